#include "stream_double.h"

#include <algorithm>
#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "device_double.h"
#include "hooks.h"

namespace gpudist::doubles {

namespace {

class Stream {
 public:
  Stream(int number, int device) : number(number), device(device) {}

  // Append work; blocks until there is room.
  void push(std::function<void()> work, size_t most) {
    std::unique_lock<std::mutex> locked(mutex_);
    changed_.wait(locked, [&] { return queue_.size() < most; });
    queue_.push_back(std::move(work));
    changed_.notify_all();
  }

  void close() {
    const std::lock_guard<std::mutex> locked(mutex_);
    is_closed_ = true;
    changed_.notify_all();
  }

  void wait_until_idle() {
    std::unique_lock<std::mutex> locked(mutex_);
    changed_.wait(locked, [this] { return queue_.empty() && !is_busy_; });
  }

  void run() {
    std::unique_lock<std::mutex> locked(mutex_);
    while (true) {
      changed_.wait(locked, [this] { return is_closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      is_busy_ = true;
      locked.unlock();
      work();
      work = nullptr;
      locked.lock();
      is_busy_ = false;
      changed_.notify_all();
    }
  }

  const int number;
  const int device;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool is_busy_ = false;
  bool is_closed_ = false;
};

struct Streams {
  std::mutex mutex;
  int made = 0;
  std::map<DeviceStream, std::shared_ptr<Stream>> open;
  std::vector<std::weak_ptr<Stream>> all;  // closed streams that are still busy, too
  std::vector<DeviceStream> handles;       // of closed streams, to be reused
  std::shared_ptr<Stream> null;            // null stream, if a test gives it a thread
};

Streams& streams() {
  static Streams& streams = *new Streams;
  return streams;
}

std::shared_ptr<Stream> start(Streams& all, int number, int device) {
  const auto stream = std::make_shared<Stream>(number, device);
  all.all.erase(std::remove_if(all.all.begin(), all.all.end(),
                               [](const std::weak_ptr<Stream>& old) { return old.expired(); }),
                all.all.end());
  all.all.push_back(stream);
  std::thread([stream] { stream->run(); }).detach();
  return stream;
}

std::shared_ptr<Stream> find(DeviceStream stream) {
  const std::lock_guard<std::mutex> locked(streams().mutex);
  if (stream == nullptr) {
    if (streams().null == nullptr) streams().null = start(streams(), 0, current_device());
    return streams().null;
  }
  const auto found = streams().open.find(stream);
  return found == streams().open.end() ? nullptr : found->second;
}

// Returns null if the null stream never had a thread.
std::shared_ptr<Stream> find_null() {
  const std::lock_guard<std::mutex> locked(streams().mutex);
  return streams().null;
}

}  // namespace

bool is_stream(DeviceStream stream) {
  return stream == nullptr || find(stream) != nullptr;
}

int stream_number(DeviceStream stream) {
  if (stream == nullptr) return 0;
  const auto found = find(stream);
  return found == nullptr ? 0 : found->number;
}

DeviceStream make_stream(int device) {
  Streams& all = streams();
  const std::lock_guard<std::mutex> locked(all.mutex);
  const auto stream = start(all, ++all.made, device);
  if (all.handles.empty()) all.handles.push_back(new char);
  const DeviceStream handle = all.handles.back();
  all.handles.pop_back();
  all.open[handle] = stream;
  return handle;
}

void close_stream(DeviceStream stream) {
  const auto found = find(stream);
  found->close();
  const std::lock_guard<std::mutex> locked(streams().mutex);
  streams().open.erase(stream);
  streams().handles.push_back(stream);
}

bool is_immediate(DeviceStream stream) {
  return stream == nullptr && setting("asynchronous") == 0 && graph_of(stream) == nullptr;
}

void enqueue(DeviceStream stream, std::function<void()> work) {
  if (const auto graph = graph_of(stream)) {
    graph->add(stream, [work = std::move(work)](DeviceStream other) { enqueue(other, work); });
  } else if (is_immediate(stream)) {
    if (const auto before = find_null()) before->wait_until_idle();
    work();
  } else {
    const auto found = find(stream);
    const std::lock_guard<std::mutex> locked(driver_lock());
    found->push(std::move(work), static_cast<size_t>(setting("queue_depth")));
  }
}

void wait_until_idle(int device) {
  std::vector<std::weak_ptr<Stream>> all;
  {
    const std::lock_guard<std::mutex> locked(streams().mutex);
    all = streams().all;
  }
  for (const std::weak_ptr<Stream>& weak : all) {
    const auto stream = weak.lock();
    if (stream != nullptr && stream->device == device) stream->wait_until_idle();
  }
}

// During capture, recording only marks a position in the graph; the event must not be queried.
void Event::record(DeviceStream stream, const std::shared_ptr<Event>& self) {
  const auto graph = graph_of(stream);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    graph_ = graph;
    if (graph != nullptr) {
      clock_ = graph->clock(stream);
      return;
    }
    number = ++recorded_;
  }
  enqueue(stream, [self, number] {
    const std::lock_guard<std::mutex> locked(self->mutex_);
    self->complete_ = std::max(self->complete_, number);
    self->completed_.notify_all();
  });
}

int Event::query(bool* is_complete) {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (graph_ != nullptr) return refuse(kCapturedEvent, "query_event: recorded in a capture");
  *is_complete = complete_ == recorded_;
  return kSuccess;
}

int Event::hold(DeviceStream stream, const std::shared_ptr<Event>& self) {
  const auto graph = graph_of(stream);
  uint64_t number;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (graph_ != nullptr) {
      if (!graph_->is_open()) {
        return refuse(kCapturedEvent, "wait_event: recorded in a capture that has ended");
      }
      if (graph != nullptr && graph != graph_) {
        return refuse(kCaptureIsolation, "wait_event: recorded in another capture");
      }
      graph_->follow(stream, clock_);
      return kSuccess;
    }
    number = recorded_;
  }
  if (graph != nullptr) {
    if (number == 0) return kSuccess;
    return refuse(kCaptureIsolation, "wait_event: in a capture, for what is outside of it");
  }
  enqueue(stream, [self, number] {
    std::unique_lock<std::mutex> locked(self->mutex_);
    self->completed_.wait(locked, [&] { return self->complete_ >= number; });
  });
  return kSuccess;
}

}  // namespace gpudist::doubles

// Enqueue a kernel that runs until the hooks are cleared.
GPUDIST_EXPORT void gpudist_double_hang(gpudist::DeviceStream stream) {
  using namespace gpudist::doubles;
  enqueue(stream, [since = clears()] { stall_until_cleared(since); });
}
