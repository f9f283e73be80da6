// One NCCL communicator, and the two ways in which communicators end.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "nccl/nccl_api.h"

namespace gpudist {

// NCCL, and the device on which this process calls it.
struct NcclOnDevice {
  const NcclApi* nccl;
  const DeviceApi* device_api;
  int device;
  // Held, shared, by every thread inside a call of NCCL's on a communicator that is in use: what is
  // freed while a thread is inside is used by it afterwards.
  std::shared_ptr<std::shared_mutex> inside = std::make_shared<std::shared_mutex>();
};

class NcclCommunicator {
 public:
  // What a wait for peers does now and then: it throws when there is nothing to wait for any more.
  using Look = std::function<void()>;

  // Collective over `members`, of which this rank is number `rank`. Throws TransportError, or what
  // `look` throws.
  static std::unique_ptr<NcclCommunicator> make(const NcclOnDevice& on, const NcclUniqueId& id,
                                                std::vector<int> members, int rank,
                                                const Look& look);
  NcclCommunicator(const NcclCommunicator&) = delete;

  // Collective over this communicator: the ranks of one color, by key, make one; `members` are
  // their world ranks. A rank of no color (negative) gets none.
  std::unique_ptr<NcclCommunicator> split(const NcclOnDevice& on, int color, int key,
                                          std::vector<int> members, const Look& look);

  NcclComm handle() const { return comm_; }
  const std::vector<int>& members() const { return members_; }

  // What broke, or nothing.
  std::string async_error();
  // The handle for who ends it, once: nothing else is asked of it from now on. Null after that.
  NcclComm take();

 private:
  NcclCommunicator(const NcclApi& api, NcclComm comm, std::vector<int> members)
      : api_(api), comm_(comm), members_(std::move(members)) {}

  const NcclApi& api_;
  const NcclComm comm_;
  const std::vector<int> members_;
  std::mutex mutex_;
  bool is_taken_ = false;
};

// Something that a thread of its own does, which may never come back.
class Beside {
 public:
  using Clock = std::chrono::steady_clock;

  enum class Stage { kBegun, kFirstPartDone, kDone };

  void reach(Stage stage);
  // Whether it is as far, or was before the deadline.
  bool wait(Stage stage, Clock::time_point deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Stage stage_ = Stage::kBegun;
};

// Abort communicators. Their kernels, and calls that wait for peers, are told to end when this
// returns; they are freed (kDone) when no thread is inside NCCL and no captured graph lives that
// has operations of theirs, which may be never.
std::shared_ptr<Beside> abort_communicators(const NcclOnDevice& on, std::vector<NcclComm> comms);

// Finalize and destroy communicators, on which nothing is under way, one after the other. Waits for
// peers, and for captured graphs with operations of theirs.
std::shared_ptr<Beside> release_communicators(const NcclOnDevice& on, std::vector<NcclComm> comms);

// Release memory of the device, and pinned memory of the host, which waits for all that is on the
// device.
std::shared_ptr<Beside> release_memory(const NcclOnDevice& on, std::vector<void*> memory,
                                       std::vector<void*> pinned);

}  // namespace gpudist
