// Streams and events of the CUDA driver double. Each stream has a thread that runs its works in
// order. The null stream runs them at once on the calling thread, unless a test requests otherwise.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "device/device_api.h"
#include "graph_double.h"

namespace gpudist::doubles {

bool is_stream(DeviceStream stream);
// Number of the stream in order of creation; the null stream is 0.
int stream_number(DeviceStream stream);

DeviceStream make_stream(int device);
// Close a stream; its remaining work still runs. Like in CUDA, the next stream may have the same
// handle.
void close_stream(DeviceStream stream);

// Run `work` after everything on the stream, or store it in the graph that is being captured. If
// the stream is full, waits for room while holding the driver's lock.
void enqueue(DeviceStream stream, std::function<void()> work);
// Whether work enqueued now runs on this thread before enqueue() returns.
bool is_immediate(DeviceStream stream);
// Wait until all streams created on the device are idle.
void wait_until_idle(int device);

// Complete when all work that was on the stream before record() is complete.
class Event {
 public:
  void record(DeviceStream stream, const std::shared_ptr<Event>& self);
  // Like hold(), returns an error of the runtime if a capture forbids the call.
  int query(bool* is_complete);
  // Make a stream wait for the work recorded so far. The stream may join a capture by it.
  int hold(DeviceStream stream, const std::shared_ptr<Event>& self);

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  std::shared_ptr<Graph> graph_;  // capture in which it was last recorded
  CaptureClock clock_;            // position in that capture
  uint64_t recorded_ = 0;
  uint64_t complete_ = 0;
};

}  // namespace gpudist::doubles
