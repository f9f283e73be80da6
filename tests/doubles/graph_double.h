// Graphs of the double of CUDA's runtime: what is put on a stream while it is captured is kept
// instead, with its pointers as they are, and each launch of the graph puts all of it on a stream.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device/device_api.h"

namespace gpudist::doubles {

// What of each stream of a capture comes before something: so many of its works.
using CaptureClock = std::map<DeviceStream, uint64_t>;

class Graph {
 public:
  using Node = std::function<void(DeviceStream)>;  // puts a work on a stream
  using Release = std::function<void()>;

  Graph(uint64_t id, DeviceStream origin);

  const uint64_t id;

  void add(DeviceStream stream, Node node);
  // Called when the graph is destroyed.
  void keep(Release release);

  // A stream joins the capture with the first event of it that it waits for.
  bool has(DeviceStream stream);
  CaptureClock clock(DeviceStream stream);
  void follow(DeviceStream stream, const CaptureClock& clock);

  // End the capture: false where a stream has works that the first stream does not wait for.
  bool end();
  bool is_open();
  void launch(DeviceStream stream);
  void destroy();

 private:
  const DeviceStream origin_;
  std::mutex mutex_;
  bool is_open_ = true;
  std::vector<Node> nodes_;
  std::vector<Release> releases_;
  std::map<DeviceStream, CaptureClock> clocks_;
};

// The graph that a stream is captured into, or null.
std::shared_ptr<Graph> graph_of(DeviceStream stream);
bool any_capture();

}  // namespace gpudist::doubles
