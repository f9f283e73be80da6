// RAII helpers around the table of GPU calls.
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

// Select the device of a thread of ours.
inline int set_device(const DeviceApi& api, int device) {
  DeviceContext context = nullptr;
  const int error = api.context_of(device, &context);
  return error != 0 ? error : api.set_context(context);
}

// Selects the thread's device. The destructor restores the thread's context, or that it has none.
class DeviceGuard {
 public:
  DeviceGuard(const DeviceApi& api, int device) : DeviceGuard(api, device, std::nothrow) {
    check_device(api, error_, "choosing a device");
  }
  // Ignores errors: for ending a world whatever the state of the device.
  DeviceGuard(const DeviceApi& api, int device, std::nothrow_t) : api_(api) {
    DeviceContext context = nullptr;
    error_ = api.context_of(device, &context);
    if (error_ == 0) error_ = api.get_context(&before_);
    if (error_ != 0 || before_ == context) return;
    error_ = api.set_context(context);
    has_changed_ = error_ == 0;
  }
  ~DeviceGuard() {
    if (has_changed_) api_.set_context(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;

 private:
  const DeviceApi& api_;
  DeviceContext before_ = nullptr;
  bool has_changed_ = false;
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
