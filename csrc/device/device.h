// RAII helpers around the table of GPU runtime calls.
#pragma once

#include <chrono>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "device/device_api.h"

namespace gpudist {

inline void check_device(const DeviceApi& api, int error, const char* what) {
  if (error != 0) throw TransportError(std::string(what) + ": " + api.error_string(error));
}

// Selects the thread's device. The destructor restores the previous one only if this process
// already has a context there, because selecting a device creates a context of several hundred MiB.
class DeviceGuard {
 public:
  DeviceGuard(const DeviceApi& api, int device) : DeviceGuard(api, device, std::nothrow) {
    check_device(api, error_, "choosing a device");
  }
  // Ignores errors: for ending a world whatever the state of the device.
  DeviceGuard(const DeviceApi& api, int device, std::nothrow_t) : api_(api) {
    int before = device;
    error_ = api.get_device(&before);
    if (error_ != 0 || before == device) return;
    bool has_context = false;
    if (api.has_context(before, &has_context) == 0 && has_context) before_ = before;
    error_ = api.set_device(device);
  }
  ~DeviceGuard() {
    if (before_ >= 0) api_.set_device(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  const DeviceApi& api_;
  int before_ = -1;
  int error_ = 0;
};

// While it exists, no graph capture forbids calls of this thread.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const DeviceApi& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
  ~RelaxedCapture() { api_.exchange_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  const DeviceApi& api_;
  int mode_ = kRelaxedCapture;
};

// Wait for an internal stream on which only short operations run.
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

// Pinned host memory.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  PinnedMemory(const DeviceApi& api, size_t bytes) : api_(&api), bytes_(bytes) {
    const RelaxedCapture relaxed(api);
    check_device(api, api.allocate_pinned(&memory_, bytes), "allocating pinned memory");
  }
  PinnedMemory(PinnedMemory&& other) noexcept { swap(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~PinnedMemory() {
    if (memory_ == nullptr) return;
    const RelaxedCapture relaxed(*api_);
    api_->release_pinned(memory_);
  }

  // Pass ownership to the caller, which releases it after waiting for the device or not at all.
  void* take() { return std::exchange(memory_, nullptr); }

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
