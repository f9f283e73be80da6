#include <array>
#include <atomic>

#include "device/cuda_driver.h"
#include "device/cuda_kernels.h"
#include "device/device_api.h"
#include "device/images.h"

namespace gpudist {

namespace {

const char* error_string(int error) {
  const CudaDriver& driver = cuda_driver();
  if (error == kCudaNoDriver) return driver.missing.c_str();
  const char* text = nullptr;
  driver.get_error_string(error, &text);
  return text != nullptr ? text : "an error that the driver does not describe";
}

int compiler_version(int* version) {
  *version = kCodeVersion;
  return 0;
}

int driver_version(int* version) {
  *version = 0;
  return cuda_driver().missing.empty() ? cuda_driver().driver_get_version(version) : 0;
}

int device_count(int* count) {
  *count = 0;
  const int error = cuda_driver().init(0);
  return error != 0 ? error : cuda_driver().device_get_count(count);
}

int context_of(int device, DeviceContext* context) {
  // Never given back: other libraries of this process use the same ones.
  static std::array<std::atomic<CudaContext>, kMostDevices> contexts{};
  if (device < 0 || device >= kMostDevices) return kCudaInvalidDevice;
  *context = contexts[device].load(std::memory_order_acquire);
  if (*context != nullptr) return 0;
  const CudaDriver& driver = cuda_driver();
  int handle = 0;
  int error = driver.init(0);
  if (error == 0) error = driver.device_get(&handle, device);
  if (error == 0) error = driver.primary_ctx_retain(context, handle);
  if (error == 0) contexts[device].store(*context, std::memory_order_release);
  return error;
}

int get_context(DeviceContext* context) {
  return cuda_driver().ctx_get_current(context);
}

int set_context(DeviceContext context) {
  return cuda_driver().ctx_set_current(context);
}

int capability(int device, int* capability) {
  int handle = 0;
  const int error = cuda_driver().device_get(&handle, device);
  return error != 0 ? error : capability_of(cuda_driver(), handle, capability);
}

int multiprocessors(int device, int* number) {
  int handle = 0;
  const int error = cuda_driver().device_get(&handle, device);
  return error != 0 ? error
                    : cuda_driver().device_get_attribute(number, kCudaMultiprocessors, handle);
}

CudaAddress address_of(const void* memory) {
  return reinterpret_cast<CudaAddress>(memory);
}

// The driver, unlike CUDA's runtime, refuses to allocate nothing.
int allocate(void** memory, size_t bytes) {
  CudaAddress address = 0;
  const int error = bytes == 0 ? 0 : cuda_driver().mem_alloc(&address, bytes);
  *memory = reinterpret_cast<void*>(address);
  return error;
}

int release(void* memory) {
  return memory == nullptr ? 0 : cuda_driver().mem_free(address_of(memory));
}

int allocate_pinned(void** memory, size_t bytes) {
  *memory = nullptr;
  if (bytes == 0) return 0;
  return cuda_driver().mem_host_alloc(memory, bytes, kCudaHostPortable | kCudaHostMapped);
}

int release_pinned(void* memory) {
  return memory == nullptr ? 0 : cuda_driver().mem_free_host(memory);
}

int copy(void* to, const void* from, size_t bytes, DeviceStream stream) {
  return cuda_driver().memcpy_async(address_of(to), address_of(from), bytes, stream);
}

int create_stream(DeviceStream* stream) {
  int least = 0, greatest = 0;
  const int error = cuda_driver().ctx_get_stream_priority_range(&least, &greatest);
  if (error != 0) return error;
  return cuda_driver().stream_create_with_priority(stream, kCudaNonBlocking, greatest);
}

int destroy_stream(DeviceStream stream) {
  return cuda_driver().stream_destroy(stream);
}

int create_event(DeviceEvent* event) {
  return cuda_driver().event_create(event, kCudaWithoutTiming);
}

int destroy_event(DeviceEvent event) {
  return cuda_driver().event_destroy(event);
}

int record_event(DeviceEvent event, DeviceStream stream) {
  return cuda_driver().event_record(event, stream);
}

int query_event(DeviceEvent event, bool* is_complete) {
  const int error = cuda_driver().event_query(event);
  *is_complete = error == 0;
  return error == kCudaNotReady ? 0 : error;
}

int wait_event(DeviceStream stream, DeviceEvent event) {
  return cuda_driver().stream_wait_event(stream, event, 0);
}

int capture_id(DeviceStream stream, uint64_t* id) {
  int status = kCudaNoCapture;
  uint64_t number = 0;
  const int error =
      cuda_driver().stream_get_capture_info(stream, &status, &number, nullptr, nullptr, nullptr);
  *id = status == kCudaNoCapture ? 0 : number;
  return error;
}

int exchange_capture_mode(int* mode) {
  return cuda_driver().thread_exchange_stream_capture_mode(mode);
}

DeviceApi make_api() {
  DeviceApi api{};
  api.abi = DeviceApi::kAbi;
  api.name = "cuda";
  api.error_string = error_string;
  api.compiler_version = compiler_version;
  api.driver_version = driver_version;
  api.device_count = device_count;
  api.context_of = context_of;
  api.get_context = get_context;
  api.set_context = set_context;
  api.capability = capability;
  api.multiprocessors = multiprocessors;
  api.check_kernels = load_kernels;
  api.allocate = allocate;
  api.release = release;
  api.allocate_pinned = allocate_pinned;
  api.release_pinned = release_pinned;
  api.copy = copy;
  api.create_stream = create_stream;
  api.destroy_stream = destroy_stream;
  api.create_event = create_event;
  api.destroy_event = destroy_event;
  api.record_event = record_event;
  api.query_event = query_event;
  api.wait_event = wait_event;
  api.capture_id = capture_id;
  api.exchange_capture_mode = exchange_capture_mode;
  api.most_inline_bytes = most_inline_bytes;
  api.launch_combine = launch_combine;
  api.launch_random = launch_random;
  api.launch_norm = launch_norm;
  return api;
}

}  // namespace

const DeviceApi* cuda_api() {
  static const DeviceApi api = make_api();
  return images().empty() ? nullptr : &api;
}

}  // namespace gpudist
