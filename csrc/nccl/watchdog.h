// A world that is watched from a thread of its own that needs neither Python nor the device, which
// may both be blocked by what has to be ended: operations that do not end, communicators that
// broke, processes of peers that ended.
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

  // Something that went wrong, for the owner to tell the world about; it answers with fail().
  struct Report {
    enum class Kind { kExpired, kBroken, kEnded };
    Kind kind;
    std::string text;  // the operation, or the error
    int rank;          // whose process ended, else -1
  };

  // find_error: the text of a communicator's error, or nothing. abort_all: end all communicators;
  // called once, by whichever thread fails first.
  Watchdog(Operations& operations, PinnedMemory failed_word, double timeout_s,
           std::function<std::string()> find_error, std::function<void()> abort_all);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  void watch_process(int rank, int pid);

  // Once for each thing that went wrong.
  std::optional<Report> next_report();

  // End the world: results on their way become worthless, every communicator is aborted, every wait
  // ends. The first text is kept. Makes no call of the device's.
  void fail(const std::string& text);
  std::string failure();
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  // Throws WorldFailed.
  void check() const;
  // Where the device reads whether the world has failed: not zero.
  const uint32_t* failed_word() const { return reinterpret_cast<uint32_t*>(failed_word_.data()); }
  // At the end of a world, for who releases it.
  void* take_failed_word();

  // End the thread, and forget the processes.
  void stop();

 private:
  void watch();
  void look_for_ended();
  // The label of an operation whose lateness nobody has answered.
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
  std::deque<Report> reports_;
  bool is_broken_ = false;
  bool is_stopping_ = false;
  std::atomic<bool> failed_{false};
  std::string failure_;
  std::thread thread_;
};

}  // namespace gpudist
