#include "watchdog.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "check.h"
#include "device.h"

namespace gpudist {

namespace {

constexpr auto kPeriod = std::chrono::milliseconds(20);
// Where the owner does not answer a report, because Python is busy elsewhere.
constexpr auto kPatience = std::chrono::milliseconds(800);
constexpr size_t kRemembered = 64;
constexpr int kAttempts = 3;

// A text as JSON has it.
std::string quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\' || static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      quoted += escaped;
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

}  // namespace

Watchdog::Watchdog(const DeviceApi& api, int device, double timeout_s,
                   std::function<std::string()> find_error, std::function<void()> abort_all)
    : api_(api),
      device_(device),
      timeout_(
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout_s))),
      find_error_(std::move(find_error)),
      abort_all_(std::move(abort_all)) {
  const DeviceGuard guard(api, device);
  void* memory = nullptr;
  check_device(api, api.allocate(&memory, sizeof(uint32_t)), "allocating device memory");
  failed_word_ = static_cast<uint32_t*>(memory);
  check_device(api, api.allocate_pinned(&memory, 2 * sizeof(uint32_t)), "allocating pinned memory");
  pinned_one_ = static_cast<uint32_t*>(memory);
  pinned_one_[0] = 1;
  pinned_one_[1] = 0;
  check_device(api, api.create_stream(&stream_), "creating a stream");
  check_device(api, api.copy(failed_word_, pinned_one_ + 1, sizeof(uint32_t), stream_), "copying");
  finish(api, stream_);
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  stop();
  const DeviceGuard guard(api_, device_);
  for (const Operation& operation : operations_) {
    if (operation.event != nullptr) api_.destroy_event(operation.event);
  }
  for (DeviceEvent event : idle_events_) api_.destroy_event(event);
  api_.destroy_stream(stream_);
  api_.release(failed_word_);
  api_.release_pinned(pinned_one_);
}

void Watchdog::stop() {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const std::lock_guard<std::mutex> locked(mutex_);
  for (const auto& [rank, descriptor] : processes_) {
    if (descriptor >= 0) close(descriptor);
  }
  processes_.clear();
}

uint64_t Watchdog::begin(const std::string& label) {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (has_failed()) throw WorldFailed();
  while (operations_.size() > kRemembered && operations_.front().is_complete) {
    operations_.pop_front();
  }
  operations_.push_back({begun_++, label, Clock::now()});
  return operations_.back().number;
}

void Watchdog::enqueued(uint64_t number, DeviceStream stream, bool is_captured) {
  const std::lock_guard<std::mutex> locked(mutex_);
  Operation* operation = find(number);
  if (operation == nullptr) return;
  if (is_captured) {
    operation->is_complete = true;
    return;
  }
  DeviceEvent event = nullptr;
  if (idle_events_.empty()) {
    check_device(api_, api_.create_event(&event), "creating an event");
  } else {
    event = idle_events_.back();
    idle_events_.pop_back();
  }
  operation->event = event;
  check_device(api_, api_.record_event(event, stream), "recording an event");
}

void Watchdog::drop(uint64_t number) {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (Operation* operation = find(number)) forget(*operation);
}

void Watchdog::forget(Operation& operation) {
  operation.is_complete = true;
  if (operation.event != nullptr) idle_events_.push_back(operation.event);
  operation.event = nullptr;
}

Watchdog::Operation* Watchdog::find(uint64_t number) {
  // They are in order, and the one that is asked for is among the last.
  for (auto it = operations_.rbegin(); it != operations_.rend(); ++it) {
    if (it->number == number) return &*it;
  }
  return nullptr;
}

void Watchdog::wait(uint64_t number, const std::function<void()>& check_signals) {
  std::unique_lock<std::mutex> locked(mutex_);
  for (int looks = 0;; ++looks) {
    if (has_failed()) throw WorldFailed();
    retire();
    const Operation* operation = find(number);
    if (operation == nullptr || operation->is_complete) return;
    // Short waits are those for a few microseconds on the device.
    const auto pause = std::chrono::microseconds(looks < 100 ? 5 : looks < 1000 ? 50 : 1000);
    changed_.wait_for(locked, pause);
    if (looks % 64 == 63) {
      locked.unlock();
      check_signals();
      locked.lock();
    }
  }
}

bool Watchdog::drain(Clock::time_point deadline) {
  std::unique_lock<std::mutex> locked(mutex_);
  while (true) {
    retire();
    const auto is_complete = [](const Operation& operation) { return operation.is_complete; };
    if (std::all_of(operations_.begin(), operations_.end(), is_complete)) return true;
    if (has_failed() || Clock::now() >= deadline) return false;
    changed_.wait_for(locked, std::chrono::milliseconds(1));
  }
}

void Watchdog::watch_process(int rank, int pid) {
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  const std::lock_guard<std::mutex> locked(mutex_);
  if (descriptor >= 0) {
    processes_.emplace_back(rank, descriptor);
  } else if (errno == ESRCH) {
    reports_.push_back({Report::Kind::kEnded, "", rank});
  }
}

std::optional<Watchdog::Report> Watchdog::next_report() {
  const std::lock_guard<std::mutex> locked(mutex_);
  if (reports_.empty()) return std::nullopt;
  Report report = std::move(reports_.front());
  reports_.pop_front();
  return report;
}

double Watchdog::oldest_s() {
  const std::lock_guard<std::mutex> locked(mutex_);
  retire();
  for (const Operation& operation : operations_) {
    if (!operation.is_complete) {
      return std::chrono::duration<double>(Clock::now() - operation.start).count();
    }
  }
  return 0;
}

std::vector<std::string> Watchdog::lines(size_t last) {
  const std::lock_guard<std::mutex> locked(mutex_);
  retire();
  std::vector<std::string> lines;
  const size_t first = operations_.size() > last ? operations_.size() - last : 0;
  for (size_t i = first; i < operations_.size(); ++i) {
    const Operation& operation = operations_[i];
    char text[64];
    const double age_s = std::chrono::duration<double>(Clock::now() - operation.start).count();
    std::snprintf(text, sizeof(text), operation.is_complete ? "finished" : "waiting for %.1f s",
                  age_s);
    lines.push_back("#" + std::to_string(operation.number) + " " + operation.label + ": " + text);
  }
  return lines;
}

void Watchdog::check() const {
  if (has_failed()) throw WorldFailed();
}

std::string Watchdog::failure() {
  const std::lock_guard<std::mutex> locked(mutex_);
  return failure_;
}

void Watchdog::fail(const std::string& text) {
  {
    const std::lock_guard<std::mutex> locked(mutex_);
    if (has_failed()) return;
    failure_ = text;
    failed_.store(true, std::memory_order_release);
  }
  // The mark comes before the end of the kernels that wait, and so before what follows them.
  mark_results();
  abort_all_();
  changed_.notify_all();
}

void Watchdog::mark_results() {
  // Whatever the device refuses, the communicators are to be aborted after this.
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    try {
      const DeviceGuard guard(api_, device_);
      const RelaxedCapture relaxed(api_);
      const int error = api_.copy(failed_word_, pinned_one_, sizeof(uint32_t), stream_);
      check_device(api_, error, "marking results");
      finish(api_, stream_);
      return;
    } catch (const TransportError&) {
      continue;
    }
  }
}

void Watchdog::watch() {
  api_.set_device(device_);
  const RelaxedCapture relaxed(api_);
  std::unique_lock<std::mutex> locked(mutex_);
  while (!stopping_) {
    changed_.wait_for(locked, kPeriod);
    if (stopping_) return;
    retire();
    if (has_failed()) continue;
    look_for_ended();
    const std::string label = look_for_late();
    locked.unlock();
    if (!label.empty()) {
      fail("{\"kind\": \"CollectiveTimeout\", \"rank\": null, \"message\": " +
           quoted("'" + label + "' was not complete at its deadline") + "}");
    }
    const std::string error = find_error_();
    locked.lock();
    if (error.empty() || is_broken_) continue;
    is_broken_ = true;
    reports_.push_back({Report::Kind::kBroken, error, -1});
  }
}

void Watchdog::look_for_ended() {
  for (auto& [rank, descriptor] : processes_) {
    pollfd ended{descriptor, POLLIN, 0};
    if (descriptor < 0 || poll(&ended, 1, 0) <= 0) continue;
    close(descriptor);
    descriptor = -1;
    reports_.push_back({Report::Kind::kEnded, "", rank});
  }
}

std::string Watchdog::look_for_late() {
  const auto now = Clock::now();
  for (Operation& operation : operations_) {
    if (operation.is_complete || now - operation.start <= timeout_) continue;
    if (!operation.is_reported) {
      operation.is_reported = true;
      reports_.push_back({Report::Kind::kExpired, operation.label, -1});
    }
    return now - operation.start > timeout_ + kPatience ? operation.label : "";
  }
  return "";
}

void Watchdog::retire() {
  // Another thread may be capturing a graph, which a question from this one would end.
  const RelaxedCapture relaxed(api_);
  for (Operation& operation : operations_) {
    if (operation.is_complete || operation.event == nullptr) continue;
    bool is_complete = false;
    const int error = api_.query_event(operation.event, &is_complete);
    if (error != 0 && !is_broken_) {
      is_broken_ = true;
      const std::string text = "asking for '" + operation.label + "': " + api_.error_string(error);
      reports_.push_back({Report::Kind::kBroken, text, -1});
    }
    if (error == 0 && is_complete) forget(operation);
  }
}

}  // namespace gpudist
