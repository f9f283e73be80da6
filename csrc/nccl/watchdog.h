// Watches a world from a separate thread, which uses neither Python nor the device: operations that
// do not complete may block both. It detects late operations, broken communicators and ended peer
// processes.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"
#include "nccl/operations.h"

namespace gpudist {

class Watchdog {
 public:
  using Clock = Operations::Clock;

  // A problem that the owner should announce to the world; the owner then calls fail().
  struct Problem {
    enum class Cause { kExpired, kBroken, kEnded };
    Cause cause;
    std::string text;  // label of the operation, or the error
    int rank;          // rank whose process ended, otherwise -1
  };

  // find_error: returns a communicator's error or an empty string. abort_all: ends all
  // communicators; called once, by the first thread that calls fail().
  Watchdog(Operations& operations, PinnedMemory failed_word, double timeout_s,
           std::function<std::string()> find_error, std::function<void()> abort_all);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  void watch_process(int rank, int pid);

  // Return each problem once.
  std::optional<Problem> next_problem();

  // End the world: results in progress become invalid, every communicator is aborted, every wait
  // ends. Only the first text is kept. Does not call the device.
  void fail(const std::string& text);
  std::string failure();
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  // Throws WorldFailed if the world has failed.
  void check() const;
  // Address at which the device reads whether the world has failed: nonzero if so.
  const uint32_t* failed_word() const { return reinterpret_cast<uint32_t*>(failed_word_.data()); }
  // At the end of a world: pass ownership of the failed word to the caller.
  void* take_failed_word();

  // End the thread and forget the processes.
  void stop();

 private:
  void watch();
  void look_for_ended();
  // Label of a late operation that has not been reported yet.
  std::string look_for_late();
  void look_for_broken();

  Operations& operations_;
  PinnedMemory failed_word_;
  const Clock::duration timeout_;
  const std::function<std::string()> find_error_;
  const std::function<void()> abort_all_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<int, int>> processes_;  // rank, pidfd
  std::deque<Problem> problems_;
  bool is_broken_ = false;
  bool is_stopping_ = false;
  std::atomic<bool> failed_{false};
  std::string failure_;
  std::thread thread_;
};

}  // namespace gpudist
