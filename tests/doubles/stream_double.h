// Streams and events of the double of CUDA's runtime. The null stream does everything at once on
// the calling thread; each created stream has a thread that does it in order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "device_api.h"

namespace gpudist::doubles {

bool is_stream(DeviceStream stream);
// In order of creation, the null stream is 0.
int stream_number(DeviceStream stream);

DeviceStream make_stream(int device);
// What is on it is still carried out.
void close_stream(DeviceStream stream);

// Do `work` after all that is on the stream.
void enqueue(DeviceStream stream, std::function<void()> work);
// Return when the created streams of a device have nothing left to do.
void wait_until_idle(int device);

uint64_t capture_of(DeviceStream stream);
bool any_capture();

// Complete when everything that was on a stream before it was recorded is.
class Event {
 public:
  void record(DeviceStream stream, const std::shared_ptr<Event>& self);
  bool is_complete();
  // Make a stream wait for what has been recorded so far.
  void hold(DeviceStream stream, const std::shared_ptr<Event>& self);

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  uint64_t recorded_ = 0;
  uint64_t complete_ = 0;
};

}  // namespace gpudist::doubles
