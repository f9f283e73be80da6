// Messages between the processes of one node, through shared memory.
//
// Every rank has a control block that all others map. A pair of ranks that talks has a mailbox: a
// ring of slots that the sender packs into and the receiver unpacks from, made by the receiver when
// it first expects a message. Large messages in long rows are read straight from the sender's
// memory where the system allows it. Messages from one rank to another match in the order they are
// posted.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/transfer.h"
#include "host/segment.h"

namespace gpudist {

struct Control;
struct Mailbox;

// One thread of a rank at a time is inside: a second one is refused, since other ranks could not
// know whose messages come first. `close` may come while one waits, and ends it.
class HostCommunicator {
 public:
  // Room for the text of a failure, with a final zero.
  static constexpr int kFailureBytes = 8 * 1024;

  // `on_wait` is called now and then while this rank waits; it may throw. Large messages are
  // pulled out of the sender's memory only if `pulls`, and if the system allows it.
  HostCommunicator(int rank, int size, double timeout_s, bool pulls, std::function<void()> on_wait);
  ~HostCommunicator();
  HostCommunicator(const HostCommunicator&) = delete;

  // Where other processes find this rank's control block: pid and descriptor.
  std::pair<pid_t, int> address() const;
  // Map the control block of every other rank, by rank; entry `rank` is ignored.
  void connect(const std::vector<std::pair<pid_t, int>>& addresses);

  // Held over calls that belong together; `begin`, `post` and `wait` take it themselves. Throws if
  // another thread has it.
  std::unique_lock<std::recursive_mutex> enter() const;
  // The same over calls from Python, which end with `leave`; whether no other thread has it.
  bool try_enter() const { return mutex_.try_lock(); }
  void leave() const { mutex_.unlock(); }

  void post(Transfer* transfer);
  // Do what can be done at once, such as packing; whether that was anything.
  bool progress();
  // Carry on until all of these are complete. Throws what ends the world.
  void wait(const std::vector<Transfer*>& transfers);
  // Let go of all transfers, which their owner did not wait for: the world cannot go on.
  void abandon();
  // Say what this rank is about to do, for the reports of others; starts the deadline.
  void begin(const Signature& signature);

  // Leave the cause of a failure for all ranks unless there is one; whether this was the first.
  bool post_failure(const std::string& text);
  // The failure of this world, empty if none.
  std::string failure() const;
  // What every rank did last, in words.
  std::vector<std::string> reports() const;
  // How many messages were posted to, or from, a rank: the number of the next one.
  uint64_t posted(bool sends, int peer) const { return (sends ? sent_ : received_).at(peer); }
  // Leave the world and let go of its memory. What was sent can still be received.
  void close();
  // In a child that was forked from a rank: let go of its memory, and leave the world as it is.
  void leave_to_parent();

 private:
  void carry_on_until_complete(const std::vector<Transfer*>& transfers);
  bool progress_send(int peer);
  bool progress_loans(int peer, Mailbox* mailbox);
  bool progress_receive(int peer);
  bool progress_own();
  bool receive_slot(Mailbox* mailbox, Transfer& transfer);
  bool receive_pull(Mailbox* mailbox, Transfer& transfer);
  void ring(int peer);
  void sleep();
  void look_around();
  Mailbox* incoming(int peer);
  Mailbox* outgoing(int peer);
  Control* control(int rank) const;
  bool has_closed(int peer) const;
  void require_open() const;
  void require_no_failure() const;
  void forget_transfers();
  void let_go();
  std::unique_lock<std::recursive_mutex> lock() const {
    return std::unique_lock<std::recursive_mutex>(mutex_);
  }

  mutable std::recursive_mutex mutex_;
  // Shared by whoever reads the controls without `mutex_`, which one that waits holds for long.
  mutable std::shared_mutex mapped_;
  const int rank_;
  const int size_;
  const double timeout_s_;
  const bool pulls_;
  const int pauses_;
  const std::function<void()> on_wait_;
  double deadline_s_ = 0;
  double next_look_s_ = 0;
  std::atomic<bool> leaving_{false};
  std::atomic<bool> closed_{false};
  bool abandoned_ = false;
  std::vector<Segment> controls_;
  std::vector<pid_t> pids_;
  std::vector<int> pidfds_;
  std::vector<Segment> inboxes_;
  std::vector<Segment> outboxes_;
  std::vector<std::deque<Transfer*>> sends_;
  std::vector<std::deque<Transfer*>> receives_;
  std::vector<int> busy_sends_;
  std::vector<int> busy_receives_;
  std::vector<Transfer*> own_;
  std::vector<uint64_t> sent_;
  std::vector<uint64_t> received_;
  std::vector<std::deque<Transfer*>> lent_;
  std::vector<uint64_t> loans_;
};

}  // namespace gpudist
