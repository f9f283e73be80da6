// Operations of a world in progress on its device, in the order in which they were enqueued. Each
// waits for the one before it, whatever their streams, so they also complete in this order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/device_api.h"

namespace gpudist {

class Operations {
 public:
  using Clock = std::chrono::steady_clock;

  struct Late {
    std::string label;
    bool is_new;  // not reported before
  };

  Operations(const DeviceApi& api, int device);
  ~Operations();
  Operations(const Operations&) = delete;

  const DeviceApi& api() const { return api_; }

  uint64_t begin(const std::string& label);
  // Make `stream` wait for all earlier operations on any stream.
  void follow(DeviceStream stream);
  // All work of operation `number` has been enqueued.
  void enqueued(uint64_t number, DeviceStream stream);
  // Stop watching an operation, which became part of a graph or did not run on a stream.
  void drop(uint64_t number);

  using Look = std::function<void()>;
  // Wait until it is complete. `check` is called continuously and `check_signals`, which may be
  // slow, occasionally; either may throw to end the wait.
  void wait(uint64_t number, const Look& check, const Look& check_signals);
  // Wait in the same way for all enqueued operations.
  void wait_for_all(const Look& check, const Look& check_signals);
  // Wait until the deadline without calling the device; returns whether nothing is in progress.
  bool drain(Clock::time_point deadline, const std::function<bool()>& gives_up);

  // Return the oldest operation if it is older than `timeout`.
  std::optional<Late> find_late(Clock::duration timeout);
  // Age in seconds of the oldest incomplete operation, 0 if there is none.
  double oldest_s() const;
  // Describe the last operations, the most recent at the end.
  std::vector<std::string> lines(size_t last) const;

  // Release device memory that no new operation uses, once the operations in progress are complete.
  // A separate thread does it, because a release waits for all work on the device.
  void discard(void* memory);
  // Release device memory like discard(), and wait for that in the manner of wait(). Operations
  // that have begun and are not enqueued do not use it.
  void give_back(void* memory, const Look& check, const Look& check_signals);
  // Keep memory that a captured graph may use as long as the graph exists.
  void keep(void* memory);

  // Return an error of the device that the polling thread found; each is returned once.
  std::optional<std::string> next_error();

  // End the polling thread, or abandon it if the device blocks it. Returns the discarded and kept
  // memory for the caller to release.
  std::vector<void*> stop();
  // From now on, discarded or kept memory is no longer in use.
  void set_idle() { has_stopped_ = true; }

 private:
  struct Operation {
    uint64_t number;
    std::string label;
    Clock::time_point start;
    DeviceEvent event = nullptr;
    bool is_complete = false;
    bool is_reported = false;
  };
  struct Discarded {
    void* memory;
    uint64_t begun;  // released when operations with smaller numbers are complete
  };
  // Outlives Operations if the polling thread is stuck.
  struct State {
    explicit State(const DeviceApi& api) : api(api) {}
    void ask();
    void wake();
    void retire(std::unique_lock<std::mutex>& locked);
    void release(std::unique_lock<std::mutex>& locked);
    Operation* find(uint64_t number);
    // The last enqueued operation not known to be complete, or null.
    const Operation* last_on_a_stream() const;
    bool is_idle() const;

    const DeviceApi& api;
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<Operation> operations;  // the most recent ones, complete or not
    std::vector<DeviceEvent> idle_events;
    uint64_t begun = 0;
    std::vector<Discarded> discarded;
    std::vector<void*> kept;
    std::string error;
    bool has_told_error = false;
    int waiting = 0;     // number of threads that wait for the polling thread
    bool rests = false;  // whether the polling thread looks rarely
    bool is_releasing = false;
    bool is_stopping = false, has_stopped = false;
  };

  void release_beside(void* memory) const;

  const DeviceApi& api_;
  const int device_;
  const std::shared_ptr<State> state_;
  std::atomic<bool> has_stopped_{false};
  std::thread thread_;
};

}  // namespace gpudist
