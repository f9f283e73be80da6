// One rank of a world over NCCL: its communicators, its staging memory, what it has under way.
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

#include "core/transfer.h"
#include "device/device.h"
#include "nccl/device_stage.h"
#include "nccl/nccl_communicator.h"
#include "nccl/operations.h"
#include "nccl/staging.h"
#include "nccl/watchdog.h"

namespace gpudist {

// What was compared with one partner lately. Two ranks have the same history of each other, and
// forget the same at the same call.
class Compared {
 public:
  bool has(const std::string& key) const { return known_.count(key) != 0; }
  // Whether others were forgotten for it, so that no more than `most` are known.
  bool add(std::string key, size_t most);

 private:
  std::unordered_set<std::string> known_;
  std::deque<std::string> order_;
};

class NcclWorld {
 public:
  using CheckSignals = std::function<void()>;

  // Frees memory of the device that somebody else has in reserve.
  using MakeRoom = std::function<void()>;

  // `nccl` may be null in a world of one.
  NcclWorld(const NcclApi* nccl, const DeviceApi& device_api, int device, int rank,
            double timeout_s, CheckSignals check_signals, MakeRoom make_room);
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;

  // The bytes of a new unique id.
  std::string new_id() const;
  // Collective over `members`, world ranks in the communicator's order. The first one is the
  // world's own, which carries all messages between two ranks.
  NcclCommunicator* connect(const std::string& id, std::vector<int> members);
  // Collective over `parent`, on which nothing may be under way: waits for that. Null for a rank of
  // no color.
  NcclCommunicator* split(NcclCommunicator& parent, int color, int key, std::vector<int> members);

  // Put stages, all their messages in flight together, on a stream.
  void run(const Signature& signature, const std::vector<DeviceCall>& calls, DeviceStream stream);
  // The same for calls of NCCL's own.
  void run_calls(const Signature& signature, std::vector<WireCall> calls, DeviceStream stream);
  // Stages that exchange nothing, in whatever state the world is.
  void run_local(const std::vector<DeviceCall>& calls, DeviceStream stream);

  // The same as run(), on a stream beside `stream`, which goes on. The event is complete when they
  // are; the caller waits for it and gives it back.
  DeviceEvent start(const Signature& signature, const std::vector<DeviceCall>& calls,
                    DeviceStream stream);
  void join(DeviceEvent event, DeviceStream stream);
  // After a failure: what follows on `stream` comes after all that is beside it, so that tensors of
  // operations nobody waits for may be freed.
  void settle(DeviceStream stream);

  // Return when all that is on the stream is complete. Throws WorldFailed.
  void synchronize(DeviceStream stream);

  const std::shared_ptr<Operations>& operations() const { return operations_; }
  Watchdog& watchdog() { return watchdog_; }
  // Start to watch something that takes place outside streams; its number, for Operations::drop().
  uint64_t begin(const std::string& label);
  NcclCommunicator* world() const;
  // Whether to compare what ranks mean at every call, not only at the first of its kind.
  bool checks() const { return checks_; }
  void set_checks(bool checks) { checks_ = checks; }
  // How much is remembered of what was compared: the same on all ranks.
  void set_remembered(size_t most) { remembered_ = most; }
  // How many times stages were put on a stream.
  uint64_t rounds() const { return rounds_; }
  size_t staging_bytes() const { return staging_.bytes(); }

  // Release the communicators, younger ones first, when all that is under way has ended; waits for
  // that, for peers, and for captured graphs with operations of theirs at most `seconds`. What is
  // not ended by then is left alone, with its memory.
  void close(double seconds);

 private:
  // Of a thread in a call that posts messages.
  struct Entry {
    std::unique_lock<std::mutex> alone;
    std::shared_lock<std::shared_mutex> inside;
  };

  using Put = std::function<void(uint64_t capture)>;

  // What is put on a stream is watched, and comes after all that was put on any before.
  DeviceEvent take_event();
  uint64_t enqueue(const std::string& label, DeviceStream stream, const Put& put);
  // Compare with partners what this rank means to do with them, unless that is known. Throws
  // PlanMismatch.
  void agree(const Signature& signature, const std::vector<WireCall>& calls, DeviceStream stream);
  // The same for stages, at little cost where all of it is known.
  void agree(const Signature& signature, const std::vector<DeviceCall>& calls, DeviceStream stream);
  void refuse_capture(const Signature& signature, DeviceStream stream) const;
  void group(std::vector<WireCall>& calls, DeviceStream stream);
  void call(const WireCall& call, DeviceStream stream);
  // What a call has given becomes not-a-number if the world has failed meanwhile.
  void guard(const WireCall& call, DeviceStream stream);
  void check_open(const std::string& label) const;
  // Throws if another thread is inside, or the world has failed.
  Entry enter();
  void look();
  std::string find_error();
  void abort_all();
  char* allocate(size_t bytes);
  // Handles of all communicators, younger ones first, for who ends them.
  std::vector<NcclComm> take_communicators();
  NcclCommunicator* keep(std::unique_ptr<NcclCommunicator> communicator);

  const DeviceApi& device_api_;
  const int device_;
  const NcclOnDevice on_;
  const int rank_;
  const CheckSignals check_signals_;
  const MakeRoom make_room_;

  // Of what puts operations on streams; the list of communicators has one of its own, since they
  // are aborted while a call hangs.
  std::mutex mutex_;
  mutable std::mutex communicators_mutex_;
  std::vector<std::unique_ptr<NcclCommunicator>> communicators_;
  std::shared_ptr<Beside> aborting_;
  std::atomic<bool> is_closed_{false};
  std::atomic<bool> checks_{false};
  std::atomic<size_t> remembered_{4096};  // with each partner, and of runs
  std::atomic<uint64_t> rounds_{0};

  Staging staging_;
  PinnedMemory pinned_;
  std::map<int64_t, std::unique_ptr<DeviceCombine>> guards_;  // by bytes
  std::map<int, Compared> compared_;                          // by partner
  std::unordered_set<std::string> runs_;                      // of which all has been compared
  DeviceStream beside_ = nullptr;
  bool has_started_ = false;
  // The stream on which stages were started whose event this is.
  std::map<DeviceEvent, DeviceStream> started_;
  std::vector<DeviceEvent> idle_events_;
  std::shared_ptr<Operations> operations_;
  Watchdog watchdog_;
};

}  // namespace gpudist
