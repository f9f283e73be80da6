#include "nccl_communicator.h"

#include <condition_variable>
#include <thread>

#include "check.h"
#include "device.h"

namespace gpudist {

namespace {

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

// `make` blocks on peers and cannot be told to stop: another thread calls it, and may still do so
// when everything else here is gone.
template <class F>
NcclComm make_beside(const NcclApi& api, const DeviceApi& device_api, int device, F make,
                     const NcclCommunicator::Look& look, const char* what) {
  const auto making = std::make_shared<Making>();
  std::thread([making, make, &api, &device_api, device] {
    NcclComm comm = nullptr;
    device_api.set_device(device);
    const RelaxedCapture relaxed(device_api);
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

  std::unique_lock<std::mutex> locked(making->mutex);
  try {
    while (!making->done.wait_for(locked, kSlice, [&] { return making->is_done; })) {
      locked.unlock();
      look();
      locked.lock();
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
                                                         const Look& look) {
  const int size = static_cast<int>(members.size());
  const auto init = [&api, id, size, rank](NcclComm* comm) {
    NcclConfig config;
    config.blocking = 1;
    return api.comm_init_rank_config(comm, size, id, rank, &config);
  };
  const NcclComm comm = make_beside(api, device_api, device, init, look, "ncclCommInitRankConfig");
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
                                                          const Look& look) {
  const int own = color < 0 ? kNcclSplitNoColor : color;
  const auto part = [&api = api_, parent = comm_, own, key](NcclComm* comm) {
    return api.comm_split(parent, own, key, comm, nullptr);
  };
  const NcclComm comm = make_beside(api_, device_api, device, part, look, "ncclCommSplit");
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
