#include "host/host_communicator.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>

#include "core/errors.h"
#include "core/message.h"
#include "host/mailbox.h"
#include "host/waiting.h"

namespace gpudist {

namespace {

constexpr double kLookEveryS = 0.05;
constexpr double kLeavingS = 1.0;

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

// Whether a signal or a debugger has stopped a process, where the system shows it.
bool is_stopped(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  // The name in brackets may itself contain brackets.
  const size_t state = text.rfind(')');
  if (state == std::string::npos || state + 2 >= text.size()) return false;
  return text[state + 2] == 'T' || text[state + 2] == 't';
}

}  // namespace

HostCommunicator::HostCommunicator(int rank, int size, double timeout_s,
                                   std::function<void()> on_wait, std::function<void()> rest)
    : rank_(rank),
      size_(size),
      timeout_s_(timeout_s),
      is_thread_(rest != nullptr),
      pauses_(is_thread_            ? 0
              : has_cores_for(size) ? kPausesAlone
                                    : kPausesShared),
      yields_(is_thread_ ? 0 : kYields),
      on_wait_(std::move(on_wait)),
      rest_(std::move(rest)),
      controls_(size),
      pids_(size, 0),
      pidfds_(size, -1),
      inboxes_(size),
      outboxes_(size),
      sends_(size),
      receives_(size),
      sent_(size, 0),
      received_(size, 0),
      readers_(kSlots),
      lent_(size),
      loans_(size, 0) {
  controls_[rank] = Segment(Control::bytes(size), !is_thread_);
  pids_[rank] = getpid();
}

HostCommunicator::~HostCommunicator() {
  close();
}

std::pair<pid_t, int64_t> HostCommunicator::address() const {
  require_open();
  return {getpid(), controls_[rank_].id()};
}

void HostCommunicator::connect(const std::vector<std::pair<pid_t, int64_t>>& addresses) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto [pid, id] = addresses[peer];
    controls_[peer] = Segment(pid, id, Control::bytes(size_));
    pids_[peer] = pid;
    if (is_thread_) continue;
    pidfds_[peer] = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    check_call(pidfds_[peer], "pidfd_open");
  }
}

Control* HostCommunicator::control(int rank) const {
  return reinterpret_cast<Control*>(controls_[rank].data());
}

bool HostCommunicator::has_closed(int peer) const {
  return control(peer)->closed.load(std::memory_order_seq_cst) != 0;
}

void HostCommunicator::require_open() const {
  if (closed_ || leaving_)
    throw TransportError("rank " + std::to_string(rank_) + " has left its world");
  if (abandoned_) {
    throw TransportError("rank " + std::to_string(rank_) +
                         " started an exchange that it did not finish, and cannot go on");
  }
}

void HostCommunicator::require_no_failure() const {
  if (control(0)->failure_state.load(std::memory_order_acquire) == 2) throw WorldFailed();
}

// A thread that waits for its turn keeps `mutex_`. It raises when it goes on, and touches no
// transfer before.
void HostCommunicator::abandon() {
  abandoned_ = true;
  std::unique_lock<std::recursive_mutex> locked(mutex_, std::try_to_lock);
  while (!locked.owns_lock() && !is_resting_ && !locked.try_lock()) usleep(100);
  forget_transfers();
}

std::unique_lock<std::recursive_mutex> HostCommunicator::enter() const {
  std::unique_lock<std::recursive_mutex> locked(mutex_, std::try_to_lock);
  if (!locked.owns_lock()) {
    if (closed_ || leaving_) require_open();
    throw SimultaneousEntry(rank_);
  }
  return locked;
}

void HostCommunicator::begin(const Signature& signature) {
  const auto locked = enter();
  require_open();
  require_no_failure();
  Control* mine = control(rank_);
  uint64_t words[kLabelBytes / 8];
  copy_text(reinterpret_cast<char*>(words), kLabelBytes, signature.label);
  const size_t used = std::min(signature.label.size(), size_t{kLabelBytes - 1}) / 8 + 1;
  for (size_t i = 0; i < used; ++i) mine->label[i].store(words[i], std::memory_order_relaxed);
  mine->operations.fetch_add(1, std::memory_order_relaxed);
  const double now = now_s();
  deadline_s_ = now + timeout_s_;
  next_look_s_ = now + kLookEveryS;
}

void HostCommunicator::wait(const std::vector<Transfer*>& transfers) {
  const auto locked = enter();
  try {
    carry_on_until_complete(transfers);
  } catch (...) {
    is_resting_ = false;
    forget_transfers();
    throw;
  }
}

void HostCommunicator::carry_on_until_complete(const std::vector<Transfer*>& transfers) {
  size_t first = 0;
  int idle = 0;
  while (first < transfers.size() && transfers[first]->complete) ++first;
  if (first < transfers.size()) require_open();
  while (true) {
    while (first < transfers.size() && transfers[first]->complete) ++first;
    if (first == transfers.size()) return;
    if (progress()) {
      idle = 0;
    } else if (++idle < pauses_) {
      pause_briefly();
    } else if (idle < pauses_ + yields_) {
      sched_yield();
    } else {
      sleep();
    }
  }
}

// The world has ended; the owners of queued transfers are about to free them.
void HostCommunicator::forget_transfers() {
  const std::lock_guard<std::mutex> locked(forgetting_);
  for (int peer = 0; peer < size_; ++peer) {
    if (lent_[peer].empty()) continue;
    outgoing(peer)->revoked.store(1, std::memory_order_seq_cst);
    lent_[peer].clear();
  }
  for (auto& queue : sends_) queue.clear();
  for (auto& queue : receives_) queue.clear();
  busy_sends_.clear();
  busy_receives_.clear();
  own_.clear();
}

// Sequential consistency of the two operations here and in sleep() guarantees that either the
// sleeper sees the slot or the ringer sees the sleeper.
void HostCommunicator::ring(int peer) {
  Control* theirs = control(peer);
  if (theirs->sleeping.load(std::memory_order_seq_cst) != 0) {
    theirs->doorbell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(&theirs->doorbell);
  }
}

void HostCommunicator::sleep() {
  Control* mine = control(rank_);
  seen_rings_ = mine->doorbell.load(std::memory_order_seq_cst);
  mine->sleeping.store(1, std::memory_order_seq_cst);
  if (!leaving_ && !progress()) is_thread_ ? rest() : futex_wait(&mine->doorbell, seen_rings_);
  mine->sleeping.store(0, std::memory_order_seq_cst);
  require_open();
  if (!is_thread_ && now_s() >= next_look_s_) look_around();
}

// What peers sent before the world failed is received first.
void HostCommunicator::rest() {
  look_around();
  is_resting_ = true;
  rest_();
  is_resting_ = false;
}

bool HostCommunicator::may_go_on() const {
  return leaving_ || abandoned_ ||
         control(rank_)->doorbell.load(std::memory_order_seq_cst) != seen_rings_ ||
         control(0)->failure_state.load(std::memory_order_acquire) == 2 || now_s() >= deadline_s_;
}

std::vector<const Transfer*> HostCommunicator::unfinished() const {
  std::vector<const Transfer*> found;
  for (const auto* queues : {&lent_, &sends_, &receives_}) {
    for (const auto& queue : *queues) found.insert(found.end(), queue.begin(), queue.end());
  }
  return found;
}

void HostCommunicator::look_around() {
  on_wait_();
  require_no_failure();
  // Where ranks are threads, `rest` finds that nobody can go on.
  if (!is_thread_) require_peers();
  const double now = now_s();
  if (now >= deadline_s_) {
    std::string text = "'" + reports()[rank_] + "' on rank " + std::to_string(rank_) +
                       " was not complete after " + seconds(timeout_s_) +
                       " s; what each rank did last:";
    const auto all = reports();
    for (int peer = 0; peer < size_; ++peer) {
      text += "\n  rank " + std::to_string(peer) + ": " + all[peer];
      if (!is_thread_ && is_stopped(pids_[peer])) {
        text += "; its process " + std::to_string(pids_[peer]) + " is stopped (kill -CONT " +
                std::to_string(pids_[peer]) + " continues it)";
      }
    }
    throw CollectiveTimeout(text);
  }
  next_look_s_ = now + kLookEveryS;
}

void HostCommunicator::require_peers() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    pollfd ended{pidfds_[peer], POLLIN, 0};
    const bool waited_for =
        !sends_[peer].empty() || !receives_[peer].empty() || !lent_[peer].empty();
    const bool closed = has_closed(peer);
    const bool dead = poll(&ended, 1, 0) == 1;
    if ((!dead && !closed) || (closed && !waited_for)) continue;
    // The ended rank's last messages may still be in the mailbox: receive them first.
    if (progress()) return;
    require_no_failure();
    throw PeerFailure("rank " + std::to_string(peer) + " (process " + std::to_string(pids_[peer]) +
                          ") " + (closed ? "has left the world" : "died") + " while rank " +
                          std::to_string(rank_) + " was in '" + reports()[rank_] + "'",
                      peer);
  }
}

Mailbox* HostCommunicator::incoming(int peer) {
  Segment& segment = inboxes_[peer];
  if (segment.data() == nullptr) {
    segment = Segment(sizeof(Mailbox), !is_thread_);
    control(peer)->outboxes[rank_].store(segment.id() + 1, std::memory_order_seq_cst);
    ring(peer);
  }
  return reinterpret_cast<Mailbox*>(segment.data());
}

Mailbox* HostCommunicator::outgoing(int peer) {
  Segment& segment = outboxes_[peer];
  if (segment.data() == nullptr) {
    const int64_t id = control(rank_)->outboxes[peer].load(std::memory_order_seq_cst) - 1;
    if (id < 0) return nullptr;
    Segment found;
    try {
      found = Segment(pids_[peer], id, sizeof(Mailbox));
    } catch (const SegmentGone&) {
      return nullptr;  // look_around() finds the cause
    } catch (const TransportError&) {
      if (!has_closed(peer)) throw;
    }
    // The descriptor number of a closed rank may be in use for another file.
    if (has_closed(peer)) return nullptr;
    segment = std::move(found);
  }
  return reinterpret_cast<Mailbox*>(segment.data());
}

bool HostCommunicator::post_failure(const std::string& text) {
  const std::shared_lock<std::shared_mutex> mapped(mapped_);
  Control* board = control(0);
  if (board == nullptr) return false;
  uint32_t none = 0;
  const bool first = board->failure_state.compare_exchange_strong(none, 1);
  if (first) {
    copy_text(board->failure, kFailureBytes, text);
    board->failure_state.store(2, std::memory_order_seq_cst);
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && controls_[peer].data() != nullptr) ring(peer);
  }
  return first;
}

std::string HostCommunicator::failure() const {
  const std::shared_lock<std::shared_mutex> mapped(mapped_);
  Control* board = control(0);
  if (board == nullptr || board->failure_state.load(std::memory_order_acquire) != 2) return "";
  return board->failure;
}

std::vector<std::string> HostCommunicator::reports() const {
  const std::shared_lock<std::shared_mutex> mapped(mapped_);
  std::vector<std::string> reports;
  for (int peer = 0; peer < size_; ++peer) {
    const Control* theirs = control(peer);
    if (theirs == nullptr) {
      reports.push_back("not connected");
      continue;
    }
    uint64_t words[kLabelBytes / 8];
    for (int i = 0; i < kLabelBytes / 8; ++i) {
      words[i] = theirs->label[i].load(std::memory_order_relaxed);
    }
    const char* text = reinterpret_cast<const char*>(words);
    const std::string label(text, strnlen(text, kLabelBytes));
    const uint64_t count = theirs->operations.load(std::memory_order_relaxed);
    reports.push_back("#" + std::to_string(count) + " " + label);
  }
  return reports;
}

void HostCommunicator::close() {
  if (closed_ || leaving_.exchange(true)) return;
  Control* mine = control(rank_);
  mine->doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(&mine->doorbell);
  std::unique_lock<std::recursive_mutex> locked(mutex_, std::try_to_lock);
  const bool is_alone = locked.owns_lock();
  for (const double end_s = now_s() + kLeavingS; !locked.owns_lock() && now_s() < end_s;) {
    usleep(1000);
    (void)locked.try_lock();
  }
  closed_ = true;
  if (locked.owns_lock()) forget_transfers();
  mine->closed.store(1, std::memory_order_seq_cst);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_ && controls_[peer].data() != nullptr) ring(peer);
  }
  // A waiting thread may still read the failure. Keep the mapping until the communicator is
  // destroyed.
  if (is_alone) let_go();
}

void HostCommunicator::leave_to_parent() {
  closed_ = true;
  // After fork() the locks may be held by threads that do not exist in this process.
  new (&mutex_) std::recursive_mutex;
  new (&mapped_) std::shared_mutex;
  new (&forgetting_) std::mutex;
  for (auto& loans : lent_) loans.clear();
  let_go();
}

void HostCommunicator::let_go() {
  const std::unique_lock<std::shared_mutex> mapped(mapped_);
  // Messages that this rank has sent are in the receivers' memory.
  inboxes_.assign(size_, Segment());
  outboxes_.assign(size_, Segment());
  controls_.assign(size_, Segment());
  for (int& fd : pidfds_) {
    if (fd >= 0) ::close(fd);
    fd = -1;
  }
}

}  // namespace gpudist
