// Streams and events of the double of CUDA's runtime. Each stream has a thread that does its works
// in order; the null stream does them at once on the calling thread, unless a test wants it
// otherwise.
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
// In order of creation, the null stream is 0.
int stream_number(DeviceStream stream);

DeviceStream make_stream(int device);
// What is on it is still carried out. The next stream has the same handle, as CUDA's may have.
void close_stream(DeviceStream stream);

// Do `work` after all that is on the stream, or keep it in the graph that is being captured. Where
// a stream has no room, this waits for some with the driver's lock held.
void enqueue(DeviceStream stream, std::function<void()> work);
// Whether what is put on a stream now is done on this thread before enqueue() returns.
bool is_immediate(DeviceStream stream);
// Return when the created streams of a device have nothing left to do.
void wait_until_idle(int device);

// Complete when everything that was on a stream before it was recorded is.
class Event {
 public:
  void record(DeviceStream stream, const std::shared_ptr<Event>& self);
  // Like hold(), an error of the runtime's where a capture forbids it.
  int query(bool* is_complete);
  // Make a stream wait for what has been recorded so far; with it, the stream may join a capture.
  int hold(DeviceStream stream, const std::shared_ptr<Event>& self);

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  std::shared_ptr<Graph> graph_;  // of the capture in which it was recorded last
  CaptureClock clock_;            // there
  uint64_t recorded_ = 0;
  uint64_t complete_ = 0;
};

}  // namespace gpudist::doubles
