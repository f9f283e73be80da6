// Messages between the processes of one node, through shared memory.
//
// Every rank has a control block that all others map. A pair of ranks that talks has a mailbox: a
// ring of slots that the sender packs into and the receiver unpacks from, made by the receiver when
// it first expects a message. Messages from one rank to another match in the order they are posted.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "packing.h"
#include "segment.h"

namespace gpudist {

// What an operation is called, and the 16 bytes by which ranks tell whether they mean the same.
struct Signature {
  std::string label;
  std::string digest;
};

// One message, or one piece of work between messages of the same rank.
struct Transfer {
  enum class Kind { kSend, kReceive, kLocal };

  Kind kind = Kind::kSend;
  int peer = -1;
  int64_t bytes = 0;
  char* tensor = nullptr;
  const std::vector<BoxView>* boxes = nullptr;
  bool adds = false;
  Dtype dtype = Dtype::kUint8;
  std::function<void()> local;
  const Transfer* after = nullptr;  // what must be complete before this one touches the tensor
  const Signature* signature = nullptr;

  uint64_t sequence = 0;
  int64_t moved = 0;
  bool header_done = false;
  bool complete = false;
  BoxStream stream;
};

struct Control;
struct Mailbox;

// Calls from several threads of a rank come one after the other; `close` comes when none is under
// way.
class HostCommunicator {
 public:
  // Room for the text of a failure, with a final zero.
  static constexpr int kFailureBytes = 8 * 1024;

  // `on_wait` is called now and then while this rank waits; it may throw.
  HostCommunicator(int rank, int size, double timeout_s, std::function<void()> on_wait);
  ~HostCommunicator();
  HostCommunicator(const HostCommunicator&) = delete;

  // Where other processes find this rank's control block: pid and descriptor.
  std::pair<pid_t, int> address() const;
  // Map the control block of every other rank, by rank; entry `rank` is ignored.
  void connect(const std::vector<std::pair<pid_t, int>>& addresses);

  // Held over calls that belong together; `begin`, `post` and `wait` take it themselves.
  std::unique_lock<std::recursive_mutex> lock() const {
    return std::unique_lock<std::recursive_mutex>(mutex_);
  }

  void post(Transfer* transfer);
  // Carry on until all of these are complete. Throws what ends the world.
  void wait(const std::vector<Transfer*>& transfers);
  // Say what this rank is about to do, for the reports of others; starts the deadline.
  void begin(const Signature& signature);

  // Leave the cause of a failure for all ranks unless there is one; whether this was the first.
  bool post_failure(const std::string& text);
  // The failure of this world, empty if none.
  std::string failure() const;
  // What every rank did last, in words.
  std::vector<std::string> reports() const;
  // Leave the world and let go of its memory. What was sent can still be received.
  void close();

 private:
  void carry_on_until_complete(const std::vector<Transfer*>& transfers);
  bool progress();
  bool progress_send(int peer);
  bool progress_receive(int peer);
  void ring(int peer);
  void sleep();
  void look_around();
  Mailbox* incoming(int peer);
  Mailbox* outgoing(int peer);
  Control* control(int rank) const;
  bool has_closed(int peer) const;
  void require_open() const;
  void forget_transfers();

  mutable std::recursive_mutex mutex_;
  const int rank_;
  const int size_;
  const double timeout_s_;
  const int spins_;
  const std::function<void()> on_wait_;
  double deadline_s_ = 0;
  double next_look_s_ = 0;
  bool closed_ = false;
  std::vector<Segment> controls_;
  std::vector<pid_t> pids_;
  std::vector<int> pidfds_;
  std::vector<Segment> inboxes_;
  std::vector<Segment> outboxes_;
  std::vector<std::deque<Transfer*>> sends_;
  std::vector<std::deque<Transfer*>> receives_;
  std::vector<int> busy_sends_;
  std::vector<int> busy_receives_;
  std::vector<Transfer*> locals_;
  std::vector<uint64_t> sent_;
  std::vector<uint64_t> received_;
};

}  // namespace gpudist
