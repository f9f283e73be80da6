// What runs on a GPU, watched from a thread of its own that never needs Python: operations that do
// not end, communicators that broke, processes of peers that ended.
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

#include "device_api.h"

namespace gpudist {

class Watchdog {
 public:
  using Clock = std::chrono::steady_clock;

  // Something that went wrong, for the owner to tell the world about; it answers with fail().
  struct Report {
    enum class Kind { kExpired, kBroken, kEnded };
    Kind kind;
    std::string text;  // the operation, or the error
    int rank;          // whose process ended, else -1
  };

  // find_error: the text of a communicator's error, or nothing. abort_all: end all communicators;
  // called once, by whichever thread fails first.
  Watchdog(const DeviceApi& api, int device, double timeout_s,
           std::function<std::string()> find_error, std::function<void()> abort_all);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

  // Start to watch an operation: from now on it has the deadline. Throws WorldFailed.
  uint64_t begin(const std::string& label);
  // Everything of it is on the stream. `is_captured`: it is part of a graph, and not watched.
  void enqueued(uint64_t operation, DeviceStream stream, bool is_captured);
  // It was not enqueued.
  void drop(uint64_t operation);
  // Return when it is complete. Throws WorldFailed.
  void wait(uint64_t operation, const std::function<void()>& check_signals);
  // Wait for everything, at most so long; whether there is nothing under way.
  bool drain(Clock::time_point deadline);

  void watch_process(int rank, int pid);

  // Once for each thing that went wrong.
  std::optional<Report> next_report();
  // Age in seconds of the oldest operation that is not complete, 0 if there is none.
  double oldest_s();
  // The last operations in words, the most recent at the end.
  std::vector<std::string> lines(size_t last);

  // End the world: results on their way become worthless, every communicator is aborted, every wait
  // ends. The first text is kept.
  void fail(const std::string& text);
  std::string failure();
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }
  void check() const;
  // In the device's memory: not zero when the world has failed.
  const uint32_t* failed_word() const { return failed_word_; }

  // End the thread, and forget the processes.
  void stop();

 private:
  struct Operation {
    uint64_t number;
    std::string label;
    Clock::time_point start;
    DeviceEvent event = nullptr;
    bool is_complete = false;
    bool is_reported = false;
  };

  void watch();
  void retire();
  void look_for_ended();
  // The label of an operation whose lateness nobody has answered.
  std::string look_for_late();
  void mark_results();
  void forget(Operation& operation);
  Operation* find(uint64_t number);

  const DeviceApi& api_;
  const int device_;
  const Clock::duration timeout_;
  const std::function<std::string()> find_error_;
  const std::function<void()> abort_all_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> operations_;  // the last ones, complete or not
  std::vector<DeviceEvent> idle_events_;
  uint64_t begun_ = 0;
  std::vector<std::pair<int, int>> processes_;  // rank, pidfd
  std::deque<Report> reports_;
  bool is_broken_ = false;
  bool stopping_ = false;
  std::atomic<bool> failed_{false};
  std::string failure_;

  uint32_t* failed_word_ = nullptr;
  uint32_t* pinned_one_ = nullptr;
  DeviceStream stream_ = nullptr;
  std::thread thread_;
};

}  // namespace gpudist
