#include "nccl/nccl_communicator.h"

#include <thread>

#include "core/errors.h"
#include "device/device.h"

namespace gpudist {

namespace {

constexpr auto kSlice = std::chrono::milliseconds(5);
// Time in which NCCL sets the flags that end its kernels; normally microseconds.
constexpr auto kFlagsTime = std::chrono::seconds(1);

// Result of a thread that may never return, and whether the result is still needed.
struct Making {
  std::mutex mutex;
  std::condition_variable done;
  bool is_done = false;
  bool is_abandoned = false;
  int result = 0;
  NcclComm comm = nullptr;
};

// Call `make` in another thread: it blocks until peers call it too and cannot be cancelled, so it
// may still be running when all other state has been destroyed.
template <class F>
NcclComm make_beside(const NcclOnDevice& on, const F& make, const NcclCommunicator::Look& look,
                     const char* what) {
  const auto making = std::make_shared<Making>();
  std::thread([making, make, on] {
    NcclComm comm = nullptr;
    set_device(*on.device_api, on.device);
    const RelaxedCapture relaxed(*on.device_api);
    const int result = make(&comm);
    std::unique_lock<std::mutex> locked(making->mutex);
    making->comm = comm;
    making->result = result;
    making->is_done = true;
    const bool is_abandoned = making->is_abandoned;
    locked.unlock();
    making->done.notify_all();
    if (is_abandoned && result == kNcclSuccess && comm != nullptr) on.nccl->comm_abort(comm);
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
  check_nccl(*on.nccl, making->result, nullptr, what);
  return making->comm;
}

template <class F>
std::shared_ptr<Beside> run_beside(const F& run) {
  const auto beside = std::make_shared<Beside>();
  std::thread([beside, run] {
    run(*beside);
    beside->reach(Beside::Milestone::kDone);
  }).detach();
  return beside;
}

}  // namespace

std::unique_ptr<NcclCommunicator> NcclCommunicator::make(const NcclOnDevice& on,
                                                         const NcclUniqueId& id,
                                                         std::vector<int> members, int rank,
                                                         const Look& look) {
  const int size = static_cast<int>(members.size());
  const auto init = [nccl = on.nccl, id, size, rank](NcclComm* comm) {
    NcclConfig config;
    config.blocking = 1;
    return nccl->comm_init_rank_config(comm, size, id, rank, &config);
  };
  const NcclComm comm = make_beside(on, init, look, "ncclCommInitRankConfig");
  return std::unique_ptr<NcclCommunicator>(
      new NcclCommunicator(*on.nccl, comm, std::move(members)));
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::split(const NcclOnDevice& on, int color,
                                                          int key, std::vector<int> members,
                                                          const Look& look) {
  const int own = color < 0 ? kNcclSplitNoColor : color;
  const auto part = [nccl = on.nccl, parent = comm_, own, key, lock = on.inside](NcclComm* comm) {
    const std::shared_lock<std::shared_mutex> inside(*lock);
    return nccl->comm_split(parent, own, key, comm, nullptr);
  };
  const NcclComm comm = make_beside(on, part, look, "ncclCommSplit");
  if (comm == nullptr) return nullptr;
  return std::unique_ptr<NcclCommunicator>(
      new NcclCommunicator(*on.nccl, comm, std::move(members)));
}

std::string NcclCommunicator::async_error() {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (is_taken_) return "";
  int error = kNcclSuccess;
  const int result = api_.comm_get_async_error(comm_, &error);
  if (result != kNcclSuccess) error = result;
  if (error == kNcclSuccess || error == kNcclInProgress) return "";
  const char* const more = api_.get_last_error == nullptr ? nullptr : api_.get_last_error(comm_);
  std::string text = api_.get_error_string(error);
  if (more != nullptr && *more != 0) text += std::string(": ") + more;
  return text;
}

NcclComm NcclCommunicator::take() {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (is_taken_) return nullptr;
  is_taken_ = true;
  return comm_;
}

void Beside::reach(Milestone milestone) {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    milestone_ = milestone;
  }
  changed_.notify_all();
}

bool Beside::wait(Milestone milestone, Clock::time_point deadline) {
  std::unique_lock<std::mutex> locked(mutex_);
  return changed_.wait_until(locked, deadline, [&] { return milestone_ >= milestone; });
}

std::shared_ptr<Beside> abort_communicators(const NcclOnDevice& on, std::vector<NcclComm> comms) {
  const auto aborting = run_beside([on, comms = std::move(comms)](Beside& beside) {
    // In a group, ncclCommAbort sets the abort flags at once, and the end of the group frees
    // memory. No call of the device may come before it, because such a call may wait for kernels
    // that only the flags end.
    const bool is_grouped = on.nccl->group_start() == kNcclSuccess;
    for (NcclComm comm : comms) on.nccl->comm_abort(comm);
    beside.reach(Beside::Milestone::kFirstPartDone);
    if (!is_grouped) return;
    set_device(*on.device_api, on.device);
    const RelaxedCapture relaxed(*on.device_api);
    {
      const std::unique_lock<std::shared_mutex> nobody_inside(*on.inside);
    }
    on.nccl->group_end();
  });
  aborting->wait(Beside::Milestone::kFirstPartDone, Beside::Clock::now() + kFlagsTime);
  return aborting;
}

std::shared_ptr<Beside> release_communicators(const NcclOnDevice& on, std::vector<NcclComm> comms) {
  return run_beside([on, comms = std::move(comms)](Beside&) {
    set_device(*on.device_api, on.device);
    for (NcclComm comm : comms) {
      on.nccl->comm_finalize(comm);
      on.nccl->comm_destroy(comm);
    }
  });
}

std::shared_ptr<Beside> release_memory(const NcclOnDevice& on, std::vector<void*> memory,
                                       std::vector<void*> pinned) {
  return run_beside([on, memory = std::move(memory), pinned = std::move(pinned)](Beside&) {
    set_device(*on.device_api, on.device);
    const RelaxedCapture relaxed(*on.device_api);
    for (void* piece : memory) on.device_api->release(piece);
    for (void* piece : pinned) on.device_api->release_pinned(piece);
  });
}

}  // namespace gpudist
