// Messages between the processes of one node, through shared memory, or between threads of one
// process.
//
// Every rank has a control block that all others map. Each pair of ranks that exchanges messages
// has a mailbox: a ring of slots that the sender packs into and the receiver unpacks from. The
// receiver creates it when it first expects a message. The slots stay in the cache, which makes two
// copies of a large message faster than the system's one from process to process, whose cost is by
// the page. Threads read large messages where the sender has them. Messages from one rank to
// another match in posting order.
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

#include "core/message.h"
#include "core/transfer.h"
#include "host/segment.h"

namespace gpudist {

struct Control;
struct Mailbox;

// Only one thread of a rank may use it at a time; a second one raises, because the order of their
// messages would be undefined. `close` may be called while a thread waits, and ends the wait.
class HostCommunicator {
 public:
  // Size of a failure's text, with its terminating zero.
  static constexpr int kFailureBytes = 64 * 1024;

  // `on_wait` is called periodically while this rank waits; it may throw.
  //
  // With `rest`, the ranks are threads of this process, of which one runs at a time. A rank that
  // can do nothing calls it, and it returns when the rank `may_go_on` and has its turn; it may
  // throw.
  HostCommunicator(int rank, int size, double timeout_s, std::function<void()> on_wait,
                   std::function<void()> rest = nullptr);
  ~HostCommunicator();
  HostCommunicator(const HostCommunicator&) = delete;

  // Process id and id of the segment through which other ranks map this rank's control block.
  std::pair<pid_t, int64_t> address() const;
  // Map the control block of every other rank, by rank; entry `rank` is ignored.
  void connect(const std::vector<std::pair<pid_t, int64_t>>& addresses);

  // Lock to hold across related calls; `begin`, `post` and `wait` also take it themselves. Throws
  // if another thread holds it.
  std::unique_lock<std::recursive_mutex> enter() const;
  // The same lock for calls from Python, released by `leave`. Returns false if another thread holds
  // it.
  bool try_enter() const { return mutex_.try_lock(); }
  void leave() const { mutex_.unlock(); }

  // See `Given::fold`.
  void fold(const std::vector<int>& peers, uint64_t number, const std::string& what) {
    given_.fold(peers, number, what);
  }
  void post(Transfer* transfer);
  // Do everything possible without waiting, such as packing. Returns whether anything was done.
  bool progress();
  // Make progress until all of these are complete. Throws if the world ends.
  void wait(const std::vector<Transfer*>& transfers);
  // Drop all transfers after their owner failed to wait for them. The world becomes unusable.
  void abandon();
  // Publish the operation this rank starts, for other ranks' reports, and start its deadline.
  void begin(const Signature& signature);

  // Publish the cause of a failure unless one is published already; returns whether this was the
  // first.
  bool post_failure(const std::string& text);
  // Text of the world's failure, or an empty string.
  std::string failure() const;
  // Whether a rank that waits should try again: a peer has done something for it, the world has
  // ended, or its deadline has passed.
  bool may_go_on() const;
  // Messages that are not complete. No thread of this rank may run meanwhile.
  std::vector<const Transfer*> unfinished() const;
  // Description of every rank's last operation.
  std::vector<std::string> reports() const;
  // Number of messages posted to or from a rank, which is also the number of the next message.
  uint64_t posted(bool sends, int peer) const { return (sends ? sent_ : received_).at(peer); }
  // Leave the world and release its memory. Messages already sent can still be received.
  void close();
  // In a forked child: release its memory without changing the world.
  void leave_to_parent();

 private:
  void carry_on_until_complete(const std::vector<Transfer*>& transfers);
  bool progress_send(int peer);
  bool share_piece(const Transfer& transfer, int* slot);
  bool progress_loans(int peer, Mailbox* mailbox);
  bool progress_receive(int peer);
  bool progress_own();
  bool receive_slot(Mailbox* mailbox, Transfer& transfer);
  bool receive_lent(Mailbox* mailbox, Transfer& transfer);
  void ring(int peer);
  void sleep();
  void look_around();
  void rest();
  void require_peers();
  Mailbox* incoming(int peer);
  Mailbox* outgoing(int peer);
  Control* control(int rank) const;
  bool has_closed(int peer) const;
  void require_open() const;
  void require_no_failure() const;
  void forget_transfers();
  void let_go();

  mutable std::recursive_mutex mutex_;
  // Held shared while reading the controls without `mutex_`, which a waiting thread holds for long.
  mutable std::shared_mutex mapped_;
  const int rank_;
  const int size_;
  const double timeout_s_;
  const bool is_thread_;
  const int pauses_, yields_;
  const std::function<void()> on_wait_;
  const std::function<void()> rest_;
  double deadline_s_ = 0;
  double next_look_s_ = 0;
  std::atomic<bool> leaving_{false};
  std::atomic<bool> closed_{false};
  std::atomic<bool> abandoned_{false};
  // Whether the thread that holds `mutex_` waits for its turn, and the lock of `forget_transfers`,
  // which another thread may call then.
  std::atomic<bool> is_resting_{false};
  std::mutex forgetting_;
  uint32_t seen_rings_ = 0;
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
  Given given_;
  // Who reads a shared slot: how many receivers have yet to be told of it, and the mailboxes of the
  // others, with the number of their slot that refers to it.
  struct Readers {
    const SharedPacking* packing = nullptr;
    int untold = 0;
    std::vector<std::pair<const Mailbox*, uint64_t>> told;

    bool are_done() const;
  };
  std::vector<Readers> readers_;
  int next_shared_ = 0;
  std::vector<std::deque<Transfer*>> lent_;
  std::vector<uint64_t> loans_;
};

}  // namespace gpudist
