// A test double of CUDA's runtime: memory of the device is the host's. Nothing it does is a result
// of CUDA.
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

#include "hooks.h"
#include "nccl_group.h"
#include "stream_double.h"

namespace gpudist {

namespace doubles {

namespace {

// Of cudaError_t.
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kNoKernelImage = 209;
constexpr int kInvalidHandle = 400;
constexpr int kCaptureUnsupported = 900;
constexpr int kUnknown = 999;

constexpr size_t kAlignment = 512;
constexpr int kFreshByte = 0xcd;

struct Allocation {
  bool is_pinned;
  int device;
};

struct Objects {
  std::mutex mutex;
  std::map<void*, Allocation> memory;
  std::map<DeviceEvent, std::shared_ptr<Event>> events;
};

Objects& objects() {
  static Objects& objects = *new Objects;
  return objects;
}

thread_local int current_device = 0;
thread_local int capture_mode = 0;

bool capture_forbids() {
  return capture_mode != kRelaxedCapture && any_capture();
}

std::shared_ptr<Event> find_event(DeviceEvent event) {
  const std::lock_guard<std::mutex> locked(objects().mutex);
  const auto found = objects().events.find(event);
  return found == objects().events.end() ? nullptr : found->second;
}

// What every call that puts work on a stream looks at first.
int check_stream(const char* call, DeviceStream stream) {
  if (device_call_fails(call)) return kUnknown;
  if (!is_stream(stream)) return refuse(kInvalidHandle, std::string(call) + ": no such stream");
  if (group_uses(stream)) {
    return refuse(kInvalidHandle,
                  std::string(call) + ": before the end of a group with operations on this stream");
  }
  return kSuccess;
}

const char* error_string(int error) {
  switch (error) {
    case kSuccess: return "no error";
    case kInvalidValue: return "invalid argument";
    case kOutOfMemory: return "out of memory";
    case kInvalidDevice: return "invalid device ordinal";
    case kNoKernelImage: return "no kernel image is available for execution on the device";
    case kInvalidHandle: return "invalid resource handle";
    case kCaptureUnsupported: return "operation not permitted when stream is capturing";
    default: return "unknown error";
  }
}

int version(int* version) {
  *version = 13000;
  return kSuccess;
}

int count_devices(int* count) {
  if (device_call_fails("device_count")) return kUnknown;
  *count = device_count();
  return kSuccess;
}

int get_device(int* device) {
  *device = current_device;
  return kSuccess;
}

int set_device(int device) {
  if (device_call_fails("set_device")) return kUnknown;
  if (device < 0 || device >= device_count()) return kInvalidDevice;
  current_device = device;
  return kSuccess;
}

int has_context(int device, bool* is_there) {
  *is_there = device >= 0 && device < device_count();
  return kSuccess;
}

int capability(int device, int* capability) {
  if (device < 0 || device >= device_count()) return kInvalidDevice;
  *capability = 90;
  return kSuccess;
}

int check_kernels() {
  return device_call_fails("check_kernels") ? kNoKernelImage : kSuccess;
}

int allocate_as(bool is_pinned, const char* call, void** memory, size_t bytes) {
  if (device_call_fails(call)) return kOutOfMemory;
  if (capture_forbids()) return refuse(kCaptureUnsupported, std::string(call) + ": in a capture");
  *memory = nullptr;
  if (bytes == 0) return kSuccess;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  *memory = rounded < bytes ? nullptr : std::aligned_alloc(kAlignment, rounded);
  if (*memory == nullptr) return kOutOfMemory;
  memset(*memory, kFreshByte, rounded);
  count_call(call);
  const std::lock_guard<std::mutex> locked(objects().mutex);
  objects().memory[*memory] = {is_pinned, current_device};
  return kSuccess;
}

int release_as(bool is_pinned, const char* call, void* memory) {
  if (device_call_fails(call)) return kUnknown;
  if (capture_forbids()) return refuse(kCaptureUnsupported, std::string(call) + ": in a capture");
  if (memory == nullptr) return kSuccess;
  int device;
  {
    const std::lock_guard<std::mutex> locked(objects().mutex);
    const auto found = objects().memory.find(memory);
    if (found == objects().memory.end() || found->second.is_pinned != is_pinned) {
      return refuse(kInvalidValue, std::string(call) + ": memory that was not allocated so");
    }
    device = found->second.device;
    objects().memory.erase(found);
    count_call(call);
  }
  wait_until_idle(device);
  std::free(memory);
  return kSuccess;
}

int allocate(void** memory, size_t bytes) {
  return allocate_as(false, "allocate", memory, bytes);
}
int release(void* memory) {
  return release_as(false, "release", memory);
}
int allocate_pinned(void** memory, size_t bytes) {
  return allocate_as(true, "allocate_pinned", memory, bytes);
}
int release_pinned(void* memory) {
  return release_as(true, "release_pinned", memory);
}

int copy(void* to, const void* from, size_t bytes, DeviceStream stream) {
  if (const int error = check_stream("copy", stream)) return error;
  if (bytes == 0) return kSuccess;
  if (to == nullptr || from == nullptr) return refuse(kInvalidValue, "copy: a null pointer");
  enqueue(stream, [=] { memmove(to, from, bytes); });
  return kSuccess;
}

int create_stream(DeviceStream* stream) {
  if (device_call_fails("create_stream")) return kUnknown;
  *stream = make_stream(current_device);
  count_call("create_stream");
  return kSuccess;
}

int destroy_stream(DeviceStream stream) {
  if (device_call_fails("destroy_stream")) return kUnknown;
  if (stream == nullptr || !is_stream(stream)) {
    return refuse(kInvalidHandle, "destroy_stream: no such stream");
  }
  close_stream(stream);
  count_call("destroy_stream");
  return kSuccess;
}

int create_event(DeviceEvent* event) {
  if (device_call_fails("create_event")) return kUnknown;
  const auto made = std::make_shared<Event>();
  *event = made.get();
  count_call("create_event");
  const std::lock_guard<std::mutex> locked(objects().mutex);
  objects().events[made.get()] = made;
  return kSuccess;
}

int destroy_event(DeviceEvent event) {
  if (device_call_fails("destroy_event")) return kUnknown;
  const std::lock_guard<std::mutex> locked(objects().mutex);
  if (objects().events.erase(event) == 1) {
    count_call("destroy_event");
    return kSuccess;
  }
  return refuse(kInvalidHandle, "destroy_event: no such event");
}

int record_event(DeviceEvent event, DeviceStream stream) {
  if (const int error = check_stream("record_event", stream)) return error;
  const auto found = find_event(event);
  if (found == nullptr) return refuse(kInvalidHandle, "record_event: no such event");
  found->record(stream, found);
  return kSuccess;
}

int query_event(DeviceEvent event, bool* is_complete) {
  if (device_call_fails("query_event")) return kUnknown;
  if (capture_forbids()) return refuse(kCaptureUnsupported, "query_event: in a capture");
  const auto found = find_event(event);
  if (found == nullptr) return refuse(kInvalidHandle, "query_event: no such event");
  *is_complete = found->is_complete();
  return kSuccess;
}

int wait_event(DeviceStream stream, DeviceEvent event) {
  if (const int error = check_stream("wait_event", stream)) return error;
  const auto found = find_event(event);
  if (found == nullptr) return refuse(kInvalidHandle, "wait_event: no such event");
  found->hold(stream, found);
  return kSuccess;
}

int capture_id(DeviceStream stream, uint64_t* id) {
  if (device_call_fails("capture_id")) return kUnknown;
  if (!is_stream(stream)) return refuse(kInvalidHandle, "capture_id: no such stream");
  *id = capture_of(stream);
  return kSuccess;
}

int exchange_capture_mode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

// Few, so that both ways are taken.
uint32_t most_inline_bytes() {
  return 1024;
}

int launch_combine(const CombineArguments& arguments, DeviceStream stream) {
  if (const int error = check_stream("launch_combine", stream)) return error;
  const auto* const begin = reinterpret_cast<const char*>(arguments.jobs);
  const size_t views_offset = reinterpret_cast<const char*>(arguments.views) - begin;
  // They travel with the launch.
  const auto tables = std::make_shared<std::vector<char>>(begin, begin + arguments.inline_bytes);
  enqueue(stream, [arguments, tables, views_offset] {
    const CombineJob* jobs = arguments.jobs;
    const CombineView* views = arguments.views;
    if (!tables->empty()) {
      jobs = reinterpret_cast<const CombineJob*>(tables->data());
      views = reinterpret_cast<const CombineView*>(tables->data() + views_offset);
    }
    for (uint32_t block = 0; block < arguments.blocks; ++block) {
      for (uint32_t thread = 0; thread < CombineArguments::kThreads; ++thread) {
        combine(arguments, jobs, views, block, thread);
      }
    }
  });
  return kSuccess;
}

constexpr DeviceApi kApi{DeviceApi::kAbi,
                         "double",
                         error_string,
                         version,
                         version,
                         count_devices,
                         get_device,
                         set_device,
                         has_context,
                         capability,
                         check_kernels,
                         allocate,
                         release,
                         allocate_pinned,
                         release_pinned,
                         copy,
                         create_stream,
                         destroy_stream,
                         create_event,
                         destroy_event,
                         record_event,
                         query_event,
                         wait_event,
                         capture_id,
                         exchange_capture_mode,
                         most_inline_bytes,
                         launch_combine};

}  // namespace

}  // namespace doubles

}  // namespace gpudist

GPUDIST_EXPORT const gpudist::DeviceApi* gpudist_device_api() {
  return &gpudist::doubles::kApi;
}
