#include "stream_double.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <thread>
#include <vector>

#include "hooks.h"

namespace gpudist::doubles {

namespace {

class Stream {
 public:
  Stream(int number, int device) : number(number), device(device) {}

  void push(std::function<void()> work) {
    const std::lock_guard<std::mutex> locked(mutex_);
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
  std::atomic<uint64_t> capture{0};

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
  std::vector<std::weak_ptr<Stream>> all;  // also those that are closed and still busy
  std::atomic<uint64_t> null_capture{0};
};

Streams& streams() {
  static Streams& streams = *new Streams;
  return streams;
}

std::shared_ptr<Stream> find(DeviceStream stream) {
  const std::lock_guard<std::mutex> locked(streams().mutex);
  const auto found = streams().open.find(stream);
  return found == streams().open.end() ? nullptr : found->second;
}

}  // namespace

bool is_stream(DeviceStream stream) {
  return stream == nullptr || find(stream) != nullptr;
}

int stream_number(DeviceStream stream) {
  const auto found = find(stream);
  return found == nullptr ? 0 : found->number;
}

DeviceStream make_stream(int device) {
  Streams& all = streams();
  const std::lock_guard<std::mutex> locked(all.mutex);
  const auto stream = std::make_shared<Stream>(++all.made, device);
  all.open[stream.get()] = stream;
  all.all.erase(std::remove_if(all.all.begin(), all.all.end(),
                               [](const std::weak_ptr<Stream>& old) { return old.expired(); }),
                all.all.end());
  all.all.push_back(stream);
  std::thread([stream] { stream->run(); }).detach();
  return stream.get();
}

void close_stream(DeviceStream stream) {
  const auto found = find(stream);
  found->close();
  const std::lock_guard<std::mutex> locked(streams().mutex);
  streams().open.erase(stream);
}

void enqueue(DeviceStream stream, std::function<void()> work) {
  if (stream == nullptr) {
    work();
  } else {
    find(stream)->push(std::move(work));
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

uint64_t capture_of(DeviceStream stream) {
  return stream == nullptr ? streams().null_capture.load() : find(stream)->capture.load();
}

bool any_capture() {
  if (streams().null_capture != 0) return true;
  const std::lock_guard<std::mutex> locked(streams().mutex);
  return std::any_of(streams().open.begin(), streams().open.end(),
                     [](const auto& entry) { return entry.second->capture != 0; });
}

void Event::record(DeviceStream stream, const std::shared_ptr<Event>& self) {
  uint64_t number;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    number = ++recorded_;
  }
  enqueue(stream, [self, number] {
    const std::lock_guard<std::mutex> locked(self->mutex_);
    self->complete_ = std::max(self->complete_, number);
    self->completed_.notify_all();
  });
}

bool Event::is_complete() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return complete_ == recorded_;
}

void Event::hold(DeviceStream stream, const std::shared_ptr<Event>& self) {
  uint64_t number;
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    number = recorded_;
  }
  enqueue(stream, [self, number] {
    std::unique_lock<std::mutex> locked(self->mutex_);
    self->completed_.wait(locked, [&] { return self->complete_ >= number; });
  });
}

}  // namespace gpudist::doubles

// What is on the stream is carried out all the same.
GPUDIST_EXPORT void gpudist_double_set_capture(gpudist::DeviceStream stream, uint64_t id) {
  using gpudist::doubles::find;
  using gpudist::doubles::streams;
  if (stream == nullptr) {
    streams().null_capture = id;
  } else if (const auto found = find(stream)) {
    found->capture = id;
  }
}
