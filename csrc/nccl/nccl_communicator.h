// An NCCL communicator, and the two ways to end one.
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
  // Held shared by every thread inside an NCCL call on a communicator in use: NCCL would use memory
  // freed during such a call.
  std::shared_ptr<std::shared_mutex> inside = std::make_shared<std::shared_mutex>();
};

class NcclCommunicator {
 public:
  // Called periodically while waiting for peers; throws to end the wait.
  using Look = std::function<void()>;

  // Collective over `members`, in which this rank has number `rank`. Throws TransportError, or what
  // `look` throws.
  static std::unique_ptr<NcclCommunicator> make(const NcclOnDevice& on, const NcclUniqueId& id,
                                                std::vector<int> members, int rank,
                                                const Look& look);
  NcclCommunicator(const NcclCommunicator&) = delete;

  // Collective over this communicator: ranks of one color form a new communicator, ordered by key;
  // `members` are their world ranks. A rank with a negative color gets null.
  std::unique_ptr<NcclCommunicator> split(const NcclOnDevice& on, int color, int key,
                                          std::vector<int> members, const Look& look);

  NcclComm handle() const { return comm_; }
  const std::vector<int>& members() const { return members_; }

  // Description of an asynchronous error, or an empty string.
  std::string async_error();
  // Pass the handle to the caller, who ends the communicator. Later calls return null.
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

// Work in a separate thread that may never return.
class Beside {
 public:
  using Clock = std::chrono::steady_clock;

  enum class Milestone { kBegun, kFirstPartDone, kDone };

  void reach(Milestone milestone);
  // Wait until the milestone is reached; returns false at the deadline.
  bool wait(Milestone milestone, Clock::time_point deadline);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  Milestone milestone_ = Milestone::kBegun;
};

// Abort communicators. On return, their kernels and the calls that wait for peers have been
// signalled to end. The memory is freed (kDone) once no thread is inside NCCL and no captured graph
// with their operations exists, which may never happen.
std::shared_ptr<Beside> abort_communicators(const NcclOnDevice& on, std::vector<NcclComm> comms);

// Finalize and destroy idle communicators one after the other. Waits for peers, and for captured
// graphs with operations of these communicators.
std::shared_ptr<Beside> release_communicators(const NcclOnDevice& on, std::vector<NcclComm> comms);

// Release device memory and pinned host memory. Waits for all work on the device.
std::shared_ptr<Beside> release_memory(const NcclOnDevice& on, std::vector<void*> memory,
                                       std::vector<void*> pinned);

}  // namespace gpudist
