#include "device_double.h"

#include <atomic>
#include <map>
#include <vector>

#include "hooks.h"

namespace gpudist::doubles {

namespace {

struct Devices {
  std::mutex driver;
  std::mutex mutex;
  std::map<int, std::string> contexts;  // by device: the call that created the context
  std::atomic<long> broken_at{-1};      // number of clears of the hooks at that time
};

// Never destroyed: threads of the doubles may outlive main().
Devices& devices() {
  static Devices& devices = *new Devices;
  return devices;
}

constexpr int kNone = -1;
thread_local int chosen = kNone;

}  // namespace

const char* error_string(int error) {
  switch (error) {
    case kSuccess: return "no error";
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kInvalidDevice: return "invalid device ordinal";
    case kInvalidContext: return "invalid device context";
    case kNoKernelImage: return "no kernel image is available for execution on the device";
    case kInvalidHandle: return "invalid resource handle";
    case kIllegalAddress: return "an illegal memory access was encountered";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    case kCaptureUnjoined: return "capturing stream has unjoined work";
    case kCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case kCapturedEvent: return "operation not permitted on an event last recorded in a capture";
    default: return "unknown error";
  }
}

int current_device() {
  return chosen == kNone ? 0 : chosen;
}

int context_of(int device, DeviceContext* context) {
  if (device_call_fails("context_of")) return kUnknown;
  if (device < 0 || device >= setting("devices")) return kInvalidDevice;
  *context = reinterpret_cast<DeviceContext>(static_cast<uintptr_t>(device + 1));
  const std::lock_guard<std::mutex> locked(devices().mutex);
  devices().contexts.emplace(device, "context_of");
  return kSuccess;
}

int get_context(DeviceContext* context) {
  *context = reinterpret_cast<DeviceContext>(static_cast<uintptr_t>(chosen + 1));
  return kSuccess;
}

int set_context(DeviceContext context) {
  if (device_call_fails("set_context")) return kUnknown;
  chosen = static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
  return kSuccess;
}

void need_context(const char* call) {
  chosen = current_device();
  const std::lock_guard<std::mutex> locked(devices().mutex);
  devices().contexts.emplace(chosen, call);
}

std::mutex& driver_lock() {
  return devices().driver;
}

int begin_call(const char* call) {
  return device_call_fails(call) ? kUnknown : pass_driver(call);
}

int pass_driver(const char* call) {
  if (chosen == kNone) {
    return refuse(kInvalidContext, std::string(call) + ": this thread has no context");
  }
  {
    const std::lock_guard<std::mutex> passed(driver_lock());
  }
  return is_device_broken() ? kIllegalAddress : kSuccess;
}

void break_device(const std::string& text) {
  log_violation("illegal address: " + text);
  devices().broken_at = clears();
}

bool is_device_broken() {
  return devices().broken_at == clears();
}

}  // namespace gpudist::doubles

// List the devices on which this process has created a context since the list was last cleared,
// with the calls that created them.
GPUDIST_EXPORT size_t gpudist_double_contexts(char* buffer, size_t bytes) {
  using gpudist::doubles::devices;
  const std::lock_guard<std::mutex> locked(devices().mutex);
  std::vector<std::string> lines;
  for (const auto& [device, call] : devices().contexts) {
    lines.push_back(std::to_string(device) + " " + call);
  }
  return gpudist::doubles::copy_lines(lines, buffer, bytes);
}

GPUDIST_EXPORT void gpudist_double_forget_contexts() {
  using gpudist::doubles::devices;
  const std::lock_guard<std::mutex> locked(devices().mutex);
  devices().contexts.clear();
}
