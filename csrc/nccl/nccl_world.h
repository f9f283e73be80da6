// One rank of a world over NCCL: its communicators, its staging memory and its operations in
// progress.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/message.h"
#include "core/transfer.h"
#include "device/device.h"
#include "nccl/device_stage.h"
#include "nccl/nccl_communicator.h"
#include "nccl/operations.h"
#include "nccl/staging.h"
#include "nccl/watchdog.h"

namespace gpudist {

// Recent comparisons with one partner. Both ranks have the same history and forget the same entries
// at the same call.
class Compared {
 public:
  bool has(const std::string& key) const { return known_.count(key) != 0; }
  // Returns whether entries were forgotten to keep at most `most`.
  bool add(std::string key, size_t most);

 private:
  std::unordered_set<std::string> known_;
  std::deque<std::string> order_;
};

class NcclWorld {
 public:
  using CheckSignals = std::function<void()>;

  // Frees cached device memory of another allocator.
  using MakeRoom = std::function<void()>;

  // `nccl` may be null in a world of one rank.
  NcclWorld(const NcclApi* nccl, const DeviceApi& device_api, int device, int rank,
            double timeout_s, CheckSignals check_signals, MakeRoom make_room);
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;

  // Return the bytes of a new unique id.
  std::string new_id() const;
  // Collective over `members`, given as world ranks in the communicator's order. The first call
  // makes the world's own communicator, which carries all messages between two ranks.
  NcclCommunicator* connect(const std::string& id, std::vector<int> members);
  // Collective over `parent`; first waits until `parent` is idle. Returns null on a rank without a
  // color.
  NcclCommunicator* split(NcclCommunicator& parent, int color, int key, std::vector<int> members);

  // Enqueue stages on a stream, with all their messages in flight at once.
  void run(const Signature& signature, const std::vector<DeviceCall>& calls, DeviceStream stream);
  // Like run(), for individual NCCL calls.
  void run_calls(const Signature& signature, std::vector<WireCall> calls, DeviceStream stream);
  // Run stages that exchange nothing; allowed after a failure, too.
  void run_local(const std::vector<DeviceCall>& calls, DeviceStream stream);

  // Like run(), on a separate stream, so that `stream` continues. The returned event completes with
  // the stages; the caller waits for it and returns it.
  DeviceEvent start(const Signature& signature, const std::vector<DeviceCall>& calls,
                    DeviceStream stream);
  void join(DeviceEvent event, DeviceStream stream);
  // After a failure: make `stream` wait for all work on separate streams, so that tensors of
  // operations without a wait can be freed.
  void settle(DeviceStream stream);

  // Wait until all work on the stream is complete. Throws WorldFailed.
  void synchronize(DeviceStream stream);

  const std::shared_ptr<Operations>& operations() const { return operations_; }
  Watchdog& watchdog() { return watchdog_; }
  // Watch what `put` enqueues on a stream, such as a graph, as an operation of this world.
  void watch(const std::string& label, DeviceStream stream, const std::function<void()>& put);
  // Start watching something that does not run on a stream; returns its number for
  // Operations::drop().
  uint64_t begin(const std::string& label);
  NcclCommunicator* world() const;
  // See `Given::fold`.
  void fold(const std::vector<int>& peers, uint64_t number, const std::string& what) {
    given_.fold(peers, number, what);
  }
  // Whether ranks compare their operations at every call instead of at the first call of a kind.
  bool checks() const { return checks_; }
  void set_checks(bool checks) { checks_ = checks; }
  // Set how many comparisons are remembered; must be equal on all ranks.
  void set_remembered(size_t most) { remembered_ = most; }
  // Number of times that stages were enqueued.
  uint64_t rounds() const { return rounds_; }
  size_t staging_bytes() const { return staging_.bytes(); }

  // Wait at most `seconds` for work in progress, for peers and for captured graphs, then release
  // the communicators, younger ones first. Those that cannot be released by then are abandoned
  // together with their memory.
  void close(double seconds);

 private:
  // Held by a thread during a call that posts messages. Throws if another call is inside or the
  // world has failed.
  struct Entry {
    Entry(NcclWorld& world, const std::string& label);
    ~Entry() { world.is_inside_ = false; }
    Entry(const Entry&) = delete;

    NcclWorld& world;
    std::unique_lock<std::recursive_mutex> alone;
    std::shared_lock<std::shared_mutex> inside;
  };

  using Put = std::function<void(uint64_t capture)>;

  // Take an idle event, or create one.
  DeviceEvent take_event();
  // Call `put` to enqueue an operation, which is watched and starts after all earlier
  // operations on any stream. Return its number.
  uint64_t enqueue(const std::string& label, DeviceStream stream, const Put& put);
  // The same order among the operations of a capture: begin after the last one on any stream.
  void put_captured(uint64_t capture, DeviceStream stream, const Put& put);
  // Compare this rank's next operations with its partners' unless the comparison is remembered.
  // Throws PlanMismatch.
  void agree(const Signature& signature, const std::vector<WireCall>& calls, DeviceStream stream);
  // The same for stages; fast if all comparisons are remembered.
  void agree(const Signature& signature, const std::vector<DeviceCall>& calls, DeviceStream stream);
  void refuse_capture(const Signature& signature, DeviceStream stream) const;
  void group(std::vector<WireCall>& calls, DeviceStream stream);
  void call(const WireCall& call, DeviceStream stream);
  // Overwrite the results of a call with NaN if the world has failed in the meantime.
  void guard(const WireCall& call, DeviceStream stream);
  void check_open(const std::string& label) const;
  void look();
  std::string find_error();
  void abort_all();
  char* allocate(size_t bytes);
  // Take the handles of all communicators, younger ones first, for a caller that ends them.
  std::vector<NcclComm> take_communicators();
  NcclCommunicator* keep(std::unique_ptr<NcclCommunicator> communicator);

  const DeviceApi& device_api_;
  const int device_;
  const NcclOnDevice on_;
  const int rank_;
  const CheckSignals check_signals_;
  const MakeRoom make_room_;

  // Protects state used to enqueue operations. Recursive, because an entered call may wait, and
  // then runs handlers of signals and finalizers of Python objects. The list of communicators has
  // its own mutex, because they are aborted while a call hangs.
  std::recursive_mutex mutex_;
  bool is_inside_ = false;  // whether a call has entered
  mutable std::mutex communicators_mutex_;
  std::vector<std::unique_ptr<NcclCommunicator>> communicators_;
  std::shared_ptr<Beside> aborting_;
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> checks_{false};
  std::atomic<size_t> remembered_{4096};  // entries for each partner, and of `runs_`
  std::atomic<uint64_t> rounds_{0};

  Given given_;
  Staging staging_;
  PinnedMemory pinned_;
  std::map<int64_t, std::unique_ptr<DeviceCombine>> guards_;  // by number of bytes
  std::map<int, Compared> compared_;                          // by partner
  std::unordered_set<std::string> runs_;  // runs whose operations have all been compared
  DeviceStream beside_ = nullptr;
  bool has_started_ = false;
  // For the event of started stages, the stream on which start() was called.
  std::map<DeviceEvent, DeviceStream> started_;
  std::vector<DeviceEvent> idle_events_;
  std::map<uint64_t, DeviceEvent> captured_;  // after the last operation of each capture
  std::shared_ptr<Operations> operations_;
  Watchdog watchdog_;
};

}  // namespace gpudist
