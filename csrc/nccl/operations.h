// The operations of a world that are under way on its device, in the order in which they were put
// on streams. Each comes after the one before it, whatever streams they are on, and so they end in
// this order, too.
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
    bool is_new;  // and has not been told of before
  };

  Operations(const DeviceApi& api, int device);
  ~Operations();
  Operations(const Operations&) = delete;

  const DeviceApi& api() const { return api_; }

  uint64_t begin(const std::string& label);
  // `stream` waits for all operations before, of whatever stream.
  void follow(DeviceStream stream);
  // Everything of an operation is on the stream.
  void enqueued(uint64_t number, DeviceStream stream);
  // It is part of a graph, or took place elsewhere, and is not watched any longer.
  void drop(uint64_t number);

  using Look = std::function<void()>;
  // Return when it is complete, or when one of the two throws. `check` is asked all the time,
  // `check_signals`, which may take longer, now and then.
  void wait(uint64_t number, const Look& check, const Look& check_signals);
  // The same for all that is on streams.
  void wait_for_all(const Look& check, const Look& check_signals);
  // Wait at most so long, without a call of the device's; whether nothing is under way.
  bool drain(Clock::time_point deadline, const std::function<bool()>& gives_up);

  // The first operation older than `timeout`, if there is one.
  std::optional<Late> find_late(Clock::duration timeout);
  // Age in seconds of the oldest operation that is not complete, 0 if there is none.
  double oldest_s() const;
  // The last operations in words, the most recent at the end.
  std::vector<std::string> lines(size_t last) const;

  // Memory of the device that no new operation uses. It is released when those under way are
  // complete, by a thread that nobody waits for: a release waits for all that is on the device.
  void discard(void* memory);
  // Memory that a captured graph may use as long as it lives.
  void keep(void* memory);

  // What went wrong when the device was asked, once.
  std::optional<std::string> next_error();

  // End the thread that asks; it is left alone if the device keeps it. Gives the memory that was
  // discarded or kept, for who releases it.
  std::vector<void*> stop();
  // Nothing uses memory any more that is discarded or kept from now on.
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
    uint64_t begun;  // released when operations of smaller numbers are complete
  };
  // Outlives this where the thread that asks is stuck.
  struct State {
    explicit State(const DeviceApi& api) : api(api) {}
    void ask();
    void retire(std::unique_lock<std::mutex>& locked);
    void release(std::unique_lock<std::mutex>& locked);
    Operation* find(uint64_t number);
    // Which is not known to be complete; null if there is none.
    const Operation* last_on_a_stream() const;
    bool is_idle() const;

    const DeviceApi& api;
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::deque<Operation> operations;  // the last ones, complete or not
    std::vector<DeviceEvent> idle_events;
    uint64_t begun = 0;
    std::vector<Discarded> discarded;
    std::vector<void*> kept;
    std::string error;
    bool has_told_error = false;
    int waiting = 0;  // how many wait for what the thread that asks finds
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
