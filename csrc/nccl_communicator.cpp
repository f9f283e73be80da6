#include "nccl_communicator.h"

#include <condition_variable>
#include <thread>

#include "check.h"

namespace gpudist {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSlice = std::chrono::milliseconds(5);

// What a thread that may never come back makes, and whether anybody still wants it.
struct Making {
  std::mutex mutex;
  std::condition_variable done;
  bool is_done = false;
  bool is_abandoned = false;
  int result = 0;
  NcclComm comm = nullptr;
};

// `make` blocks on peers and cannot be told to stop: another thread calls it.
template <class F>
NcclComm make_within(const NcclApi& api, const DeviceApi& device_api, int device, F make,
                     double timeout_s, const NcclCommunicator::Look& look, const char* what) {
  const auto making = std::make_shared<Making>();
  std::thread([making, make, &api, &device_api, device] {
    NcclComm comm = nullptr;
    device_api.set_device(device);
    const int result = make(&comm);
    std::unique_lock<std::mutex> locked(making->mutex);
    making->comm = comm;
    making->result = result;
    making->is_done = true;
    const bool is_abandoned = making->is_abandoned;
    locked.unlock();
    making->done.notify_all();
    if (is_abandoned && result == kNcclSuccess && comm != nullptr) api.comm_abort(comm);
  }).detach();

  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  std::unique_lock<std::mutex> locked(making->mutex);
  try {
    while (!making->done.wait_for(locked, kSlice, [&] { return making->is_done; })) {
      locked.unlock();
      look();
      locked.lock();
      if (Clock::now() > deadline) {
        throw CollectiveTimeout(std::string(what) + " took longer than the deadline");
      }
    }
  } catch (...) {
    if (!locked.owns_lock()) locked.lock();
    making->is_abandoned = true;
    throw;
  }
  check_nccl(api, making->result, nullptr, what);
  return making->comm;
}

}  // namespace

std::unique_ptr<NcclCommunicator> NcclCommunicator::make(const NcclApi& api,
                                                         const DeviceApi& device_api, int device,
                                                         const NcclUniqueId& id,
                                                         std::vector<int> members, int rank,
                                                         double timeout_s, const Look& look) {
  const int size = static_cast<int>(members.size());
  const auto init = [&api, id, size, rank](NcclComm* comm) {
    NcclConfig config;
    config.blocking = 1;
    return api.comm_init_rank_config(comm, size, id, rank, &config);
  };
  const NcclComm comm =
      make_within(api, device_api, device, init, timeout_s, look, "ncclCommInitRankConfig");
  return std::unique_ptr<NcclCommunicator>(
      new NcclCommunicator(api, comm, std::move(members), true));
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::adopt(const NcclApi& api, NcclComm comm,
                                                          std::vector<int> members) {
  int size = 0;
  check_nccl(api, api.comm_count(comm, &size), comm, "ncclCommCount");
  if (size != static_cast<int>(members.size())) {
    throw TransportError("the communicator to adopt has " + std::to_string(size) +
                         " ranks, the world has " + std::to_string(members.size()));
  }
  return std::unique_ptr<NcclCommunicator>(
      new NcclCommunicator(api, comm, std::move(members), false));
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::split(const DeviceApi& device_api, int device,
                                                          int color, int key,
                                                          std::vector<int> members,
                                                          double timeout_s, const Look& look) {
  const auto part = [this, color, key](NcclComm* comm) {
    return api_.comm_split(comm_, color < 0 ? kNcclSplitNoColor : color, key, comm, nullptr);
  };
  const NcclComm comm =
      make_within(api_, device_api, device, part, timeout_s, look, "ncclCommSplit");
  if (comm == nullptr) return nullptr;
  return std::unique_ptr<NcclCommunicator>(
      new NcclCommunicator(api_, comm, std::move(members), true));
}

std::string NcclCommunicator::async_error() {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (is_over_) return "";
  int error = kNcclSuccess;
  const int result = api_.comm_get_async_error(comm_, &error);
  if (result != kNcclSuccess) error = result;
  if (error == kNcclSuccess || error == kNcclInProgress) return "";
  const char* const more = api_.get_last_error == nullptr ? nullptr : api_.get_last_error(comm_);
  std::string text = api_.get_error_string(error);
  if (more != nullptr && *more != 0) text += std::string(": ") + more;
  return text;
}

bool NcclCommunicator::is_over() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return is_over_;
}

void NcclCommunicator::abort() {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (is_over_) return;
  is_over_ = true;
  if (is_ours_) api_.comm_abort(comm_);
}

void NcclCommunicator::close(double seconds) {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (is_over_) return;
    is_over_ = true;
    if (!is_ours_) return;
  }
  const auto closing = std::make_shared<Making>();
  std::thread([closing, api = &api_, comm = comm_] {
    api->comm_finalize(comm);
    {
      const std::lock_guard<std::mutex> locked(closing->mutex);
      if (closing->is_abandoned) return;
      closing->is_done = true;
    }
    api->comm_destroy(comm);
    {
      const std::lock_guard<std::mutex> locked(closing->mutex);
      closing->result = 1;
    }
    closing->done.notify_all();
  }).detach();
  std::unique_lock<std::mutex> locked(closing->mutex);
  const auto limit = std::chrono::duration<double>(seconds);
  if (closing->done.wait_for(locked, limit, [&] { return closing->result != 0; })) return;
  const bool is_destroying = closing->is_done;
  closing->is_abandoned = true;
  locked.unlock();
  if (!is_destroying) api_.comm_abort(comm_);
}

NcclCommunicator::~NcclCommunicator() {
  abort();
}

}  // namespace gpudist
