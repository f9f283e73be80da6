#include "graph_double.h"

#include <algorithm>
#include <atomic>

#include "device_double.h"
#include "hooks.h"
#include "stream_double.h"

namespace gpudist::doubles {

namespace {

struct Graphs {
  std::mutex mutex;
  uint64_t begun = 0;
  std::map<uint64_t, std::shared_ptr<Graph>> all;
  std::map<uint64_t, std::shared_ptr<Graph>> open;
  std::atomic<int> captures{0};  // read first, because calls on a stream are frequent
};

Graphs& graphs() {
  static Graphs& graphs = *new Graphs;
  return graphs;
}

std::shared_ptr<Graph> find_graph(uint64_t id) {
  const std::lock_guard<std::mutex> locked(graphs().mutex);
  const auto found = graphs().all.find(id);
  return found == graphs().all.end() ? nullptr : found->second;
}

}  // namespace

Graph::Graph(uint64_t id, DeviceStream origin)
    : id(id), origin_(origin), random_(static_cast<uint32_t>(id)) {
  clocks_[origin];
}

void Graph::add(DeviceStream stream, Node node) {
  const std::lock_guard<std::mutex> locked(mutex_);
  CaptureClock& clock = clocks_[stream];
  steps_.push_back({stream, clock, std::move(node)});
  ++clock[stream];
}

void Graph::keep(Release release) {
  const std::lock_guard<std::mutex> locked(mutex_);
  releases_.push_back(std::move(release));
}

bool Graph::has(DeviceStream stream) {
  const std::lock_guard<std::mutex> locked(mutex_);
  return clocks_.count(stream) == 1;
}

CaptureClock Graph::clock(DeviceStream stream) {
  const std::lock_guard<std::mutex> locked(mutex_);
  return clocks_[stream];
}

void Graph::follow(DeviceStream stream, const CaptureClock& clock) {
  const std::lock_guard<std::mutex> locked(mutex_);
  CaptureClock& own = clocks_[stream];
  for (const auto& [other, works] : clock) own[other] = std::max(own[other], works);
}

bool Graph::end() {
  const std::lock_guard<std::mutex> locked(mutex_);
  is_open_ = false;
  CaptureClock& first = clocks_[origin_];
  return std::all_of(clocks_.begin(), clocks_.end(),
                     [&](auto& entry) { return first[entry.first] >= entry.second[entry.first]; });
}

bool Graph::is_open() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return is_open_;
}

void Graph::launch(DeviceStream stream) {
  const std::lock_guard<std::mutex> locked(mutex_);
  std::vector<const Step*> left;
  for (const Step& step : steps_) left.push_back(&step);
  CaptureClock done;
  const auto is_ready = [&](const Step* step) {
    return std::all_of(step->after.begin(), step->after.end(),
                       [&](const auto& entry) { return done[entry.first] >= entry.second; });
  };
  while (!left.empty()) {
    std::vector<size_t> ready;
    for (size_t i = 0; i < left.size(); ++i) {
      if (is_ready(left[i])) ready.push_back(i);
    }
    const size_t chosen = ready[random_() % ready.size()];
    left[chosen]->node(stream);
    ++done[left[chosen]->stream];
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(chosen));
  }
}

void Graph::destroy() {
  std::vector<Release> releases;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    is_open_ = false;
    releases.swap(releases_);
    steps_.clear();
  }
  for (const Release& release : releases) release();
}

std::shared_ptr<Graph> graph_of(DeviceStream stream) {
  if (graphs().captures == 0) return nullptr;
  const std::lock_guard<std::mutex> locked(graphs().mutex);
  for (const auto& [id, graph] : graphs().open) {
    if (graph->has(stream)) return graph;
  }
  return nullptr;
}

bool any_capture() {
  return graphs().captures > 0;
}

}  // namespace gpudist::doubles

using namespace gpudist::doubles;

// Return the number of the new capture, 0 if the stream is invalid or is being captured already.
GPUDIST_EXPORT uint64_t gpudist_double_begin_capture(gpudist::DeviceStream stream) {
  if (!is_stream(stream) || graph_of(stream) != nullptr) {
    refuse(kInvalidHandle, "begin_capture: no such stream, or it is being captured");
    return 0;
  }
  need_context("begin_capture");
  const std::lock_guard<std::mutex> locked(graphs().mutex);
  const uint64_t id = ++graphs().begun;
  graphs().all[id] = graphs().open[id] = std::make_shared<Graph>(id, stream);
  ++graphs().captures;
  return id;
}

GPUDIST_EXPORT int gpudist_double_end_capture(uint64_t id) {
  const auto graph = find_graph(id);
  if (graph == nullptr || !graph->is_open()) {
    return refuse(kInvalidHandle, "end_capture: no such capture");
  }
  const bool is_joined = graph->end();
  {
    const std::lock_guard<std::mutex> locked(graphs().mutex);
    graphs().open.erase(id);
    --graphs().captures;
  }
  if (is_joined) return kSuccess;
  return refuse(kCaptureUnjoined, "end_capture: a stream has works that the first does not follow");
}

GPUDIST_EXPORT int gpudist_double_launch_graph(uint64_t id, gpudist::DeviceStream stream) {
  need_context("launch_graph");
  if (const int error = begin_call("launch_graph")) return error;
  const auto graph = find_graph(id);
  if (graph == nullptr || graph->is_open() || !is_stream(stream)) {
    return refuse(kInvalidHandle, "launch_graph: no such graph or stream, or it is being captured");
  }
  graph->launch(stream);
  return kSuccess;
}

GPUDIST_EXPORT int gpudist_double_destroy_graph(uint64_t id) {
  const auto graph = find_graph(id);
  if (graph == nullptr || graph->is_open()) {
    return refuse(kInvalidHandle, "destroy_graph: no such graph, or it is being captured");
  }
  {
    const std::lock_guard<std::mutex> locked(graphs().mutex);
    graphs().all.erase(id);
  }
  graph->destroy();
  return kSuccess;
}
