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
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "device.h"
#include "device_stage.h"
#include "nccl_communicator.h"
#include "staging.h"
#include "transfer.h"
#include "watchdog.h"

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

  // `nccl` may be null in a world of one.
  NcclWorld(const NcclApi* nccl, const DeviceApi& device_api, int device, int rank, int size,
            double timeout_s, CheckSignals check_signals);
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;

  // The bytes of a new unique id.
  std::string new_id() const;
  // Collective over `members`, world ranks in the communicator's order. The first one is the
  // world's own, which carries all messages between two ranks.
  NcclCommunicator* connect(const std::string& id, std::vector<int> members);
  NcclCommunicator* adopt(uintptr_t comm, std::vector<int> members);
  // Collective over `parent`. Null for a rank of no color.
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

  const DeviceApi& device_api() const { return device_api_; }
  Watchdog& watchdog() { return watchdog_; }
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
  // that and for peers at most `seconds`, then aborts.
  void close(double seconds);

 private:
  struct Registration {
    char* memory;
    bool is_nccls;  // and given back to NCCL
    void* handle;   // of its registration, null if there is none
  };

  using Put = std::function<void(uint64_t capture)>;

  // What is put on a stream is watched, comes after what is on other streams, and is the last.
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
  // Held over a call that posts messages; throws if another thread has it.
  std::unique_lock<std::mutex> enter();
  void look();
  std::string find_error();
  void abort_all();
  char* allocate(size_t bytes);
  void release(char* memory);
  NcclCommunicator* keep(std::unique_ptr<NcclCommunicator> communicator);

  const NcclApi* const nccl_;
  const DeviceApi& device_api_;
  const int device_;
  const int rank_;
  const int size_;
  const CheckSignals check_signals_;

  // Of what calls NCCL; the list of communicators has one of its own, since they are aborted while
  // a call hangs.
  std::mutex mutex_;
  mutable std::mutex communicators_mutex_;
  std::vector<std::unique_ptr<NcclCommunicator>> communicators_;
  std::vector<Registration> registrations_;
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
  // Complete when the last group is, on the stream it was on.
  DeviceEvent last_ = nullptr;
  DeviceStream last_stream_ = nullptr;
  bool has_last_ = false;
  std::vector<DeviceEvent> idle_events_;
  Watchdog watchdog_;
};

}  // namespace gpudist
