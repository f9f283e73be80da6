// Small helpers around the table of a GPU's runtime.
#pragma once

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "check.h"
#include "device_api.h"

namespace gpudist {

inline void check_device(const DeviceApi& api, int error, const char* what) {
  if (error != 0) throw TransportError(std::string(what) + ": " + api.error_string(error));
}

// Makes a device the thread's current one, and the former again.
class DeviceGuard {
 public:
  DeviceGuard(const DeviceApi& api, int device) : api_(api), device_(device) {
    check_device(api, api.get_device(&before_), "asking for the current device");
    if (before_ != device) check_device(api, api.set_device(device), "choosing a device");
  }
  ~DeviceGuard() {
    if (before_ != device_) api_.set_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  const DeviceApi& api_;
  const int device_;
  int before_ = 0;
};

// While it lives, no capture of a graph refuses a call of this thread.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const DeviceApi& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { api_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  const DeviceApi& api_;
  int mode_ = kRelaxedCapture;
};

// Wait for a stream of our own, on which nothing takes long.
inline void finish(const DeviceApi& api, DeviceStream stream) {
  DeviceEvent event = nullptr;
  check_device(api, api.create_event(&event), "creating an event");
  int error = api.record_event(event, stream);
  for (bool is_complete = false; error == 0 && !is_complete;) {
    error = api.query_event(event, &is_complete);
    if (!is_complete) std::this_thread::sleep_for(std::chrono::microseconds(10));
  }
  api.destroy_event(event);
  check_device(api, error, "waiting for a stream");
}

// Memory of the host that a device copies from and to.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(const DeviceApi& api, size_t bytes) : api_(&api), bytes_(bytes) {
    check_device(api, api.allocate_pinned(&memory_, bytes), "allocating pinned memory");
  }
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~PinnedMemory() {
    if (memory_ != nullptr) api_->release_pinned(memory_);
  }

  char* data() const { return static_cast<char*>(memory_); }
  size_t size() const { return bytes_; }

 private:
  void swap(PinnedMemory& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(memory_, other.memory_);
    std::swap(bytes_, other.bytes_);
  }

  const DeviceApi* api_ = nullptr;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace gpudist
