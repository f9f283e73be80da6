#include "nccl/watchdog.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>

#include "core/errors.h"

namespace gpudist {

namespace {

constexpr auto kPeriod = std::chrono::milliseconds(20);
// With no operation in flight, nobody waits for what this finds.
constexpr auto kPeriodAtRest = std::chrono::milliseconds(200);
// Time until a failure is acted on if the owner does not answer because Python is busy.
constexpr auto kPatience = std::chrono::milliseconds(800);

// Encode a text as JSON.
std::string quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace

Watchdog::Watchdog(Operations& operations, PinnedMemory failed_word, double timeout_s,
                   std::function<std::string()> find_error, std::function<void()> abort_all)
    : operations_(operations),
      failed_word_(std::move(failed_word)),
      timeout_(
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))),
      find_error_(std::move(find_error)),
      abort_all_(std::move(abort_all)) {
  *reinterpret_cast<uint32_t*>(failed_word_.data()) = 0;
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  stop();
}

void Watchdog::stop() {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard<std::mutex> locked(mutex_);
  for (const auto& [rank, descriptor] : processes_) {
    if (descriptor >= 0) close(descriptor);
  }
  processes_.clear();
}

void Watchdog::watch_process(int rank, int pid) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  const std::lock_guard<std::mutex> locked(mutex_);
  if (descriptor >= 0) {
    processes_.emplace_back(rank, descriptor);
  } else if (errno == ESRCH) {
    problems_.push_back({Problem::Cause::kEnded, "", rank});
  }
}

std::optional<Watchdog::Problem> Watchdog::next_problem() {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (problems_.empty()) return std::nullopt;
  Problem problem = std::move(problems_.front());
  problems_.pop_front();
  return problem;
}

void* Watchdog::take_failed_word() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return failed_word_.take();
}

void Watchdog::check() const {
  if (has_failed()) throw WorldFailed();
}

std::string Watchdog::failure() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return failure_;
}

void Watchdog::fail(const std::string& text) {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (has_failed()) return;
    failure_ = text;
    // Set the word before aborting kernels, so that work enqueued behind them sees it.
    auto* const word = reinterpret_cast<volatile uint32_t*>(failed_word_.data());
    if (word != nullptr) *word = 1;
    failed_.store(true, std::memory_order_seq_cst);
  }
  abort_all_();
  changed_.notify_all();
}

void Watchdog::watch() {
  std::unique_lock<std::mutex> locked(mutex_);
  bool rests = false;
  while (!is_stopping_) {
    changed_.wait_for(locked, rests ? kPeriodAtRest : kPeriod);
    if (is_stopping_) return;
    if (has_failed()) continue;
    look_for_ended();
    locked.unlock();
    const std::string label = look_for_late();
    if (!label.empty()) {
      fail("{\"kind\": \"CollectiveTimeout\", \"rank\": null, \"message\": " +
           quoted("'" + label + "' was not complete at its deadline") + "}");
    }
    look_for_broken();
    rests = operations_.oldest_s() == 0;
    locked.lock();
  }
}

void Watchdog::look_for_ended() {
  for (auto& [rank, descriptor] : processes_) {
    pollfd ended{descriptor, POLLIN, 0};
    if (descriptor < 0 || poll(&ended, 1, 0) <= 0) continue;
    close(descriptor);
    descriptor = -1;
    problems_.push_back({Problem::Cause::kEnded, "", rank});
  }
}

std::string Watchdog::look_for_late() {
  if (const auto late = operations_.find_late(timeout_); late && late->is_new) {
    const std::lock_guard<std::mutex> locked(mutex_);
    problems_.push_back({Problem::Cause::kExpired, late->label, -1});
  }
  const auto unanswered = operations_.find_late(timeout_ + kPatience);
  return unanswered ? unanswered->label : "";
}

void Watchdog::look_for_broken() {
  if (is_broken_) return;
  const std::string error = operations_.next_error().value_or(find_error_());
  if (error.empty()) return;
  is_broken_ = true;
  const std::lock_guard<std::mutex> locked(mutex_);
  problems_.push_back({Problem::Cause::kBroken, error, -1});
}

}  // namespace gpudist
