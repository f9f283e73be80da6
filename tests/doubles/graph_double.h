// Graphs of the CUDA driver double. Work put on a stream during capture is stored with its
// pointers; every launch of the graph enqueues all of it, in a random order that keeps what the
// events of the capture say, as a GPU may run it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "device/device_api.h"

namespace gpudist::doubles {

// For each stream of a capture, how many of its works precede something.
using CaptureClock = std::map<DeviceStream, uint64_t>;

class Graph {
 public:
  using Node = std::function<void(DeviceStream)>;  // enqueues one work on a stream
  using Release = std::function<void()>;

  Graph(uint64_t id, DeviceStream origin);

  const uint64_t id;

  void add(DeviceStream stream, Node node);
  // Release something when the graph is destroyed.
  void keep(Release release);

  // Whether the stream is part of the capture. A stream joins when it waits for an event of the
  // capture.
  bool has(DeviceStream stream);
  CaptureClock clock(DeviceStream stream);
  void follow(DeviceStream stream, const CaptureClock& clock);

  // End the capture. Returns false if a stream has works that the first stream does not wait for.
  bool end();
  bool is_open();
  void launch(DeviceStream stream);
  void destroy();

 private:
  struct Step {
    DeviceStream stream;
    CaptureClock after;  // works before it: those of its own stream, and of others
    Node node;
  };

  const DeviceStream origin_;
  std::mutex mutex_;
  bool is_open_ = true;
  std::vector<Step> steps_;
  std::mt19937 random_;
  std::vector<Release> releases_;
  std::map<DeviceStream, CaptureClock> clocks_;
};

// The graph that the stream is being captured into, or null.
std::shared_ptr<Graph> graph_of(DeviceStream stream);
bool any_capture();

}  // namespace gpudist::doubles
