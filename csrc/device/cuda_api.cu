// The CUDA runtime, linked statically, so that the module can be imported without a driver or GPU.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include "device/device_api.h"
#include "device/norm_kernels.h"
#include "device/random_launch.h"

namespace gpudist {

namespace {

// Blocks resident on a multiprocessor: half of its threads, with 64 registers each.
constexpr int kBlocksAtOnce = 4;

// Kernel with tables in device memory.
__global__ void __launch_bounds__(CombineArguments::kThreads, kBlocksAtOnce)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  combine(arguments, arguments.jobs, arguments.views, blockIdx.x, threadIdx.x);
}

// Kernel with tables passed as kernel arguments. A launch costs more the larger its arguments are.
template <uint32_t kBytes>
struct Inlined {
  CombineArguments arguments;
  uint32_t views_offset;
  alignas(16) unsigned char tables[kBytes];
};

template <uint32_t kBytes>
__global__ void __launch_bounds__(CombineArguments::kThreads, kBlocksAtOnce)
    combine_inlined_kernel(const __grid_constant__ Inlined<kBytes> inlined) {
  combine(inlined.arguments, reinterpret_cast<const CombineJob*>(inlined.tables),
          reinterpret_cast<const CombineView*>(inlined.tables + inlined.views_offset), blockIdx.x,
          threadIdx.x);
}

constexpr uint32_t kFew = 1024;
constexpr uint32_t kSome = 3840;   // supported by every driver
constexpr uint32_t kMany = 16384;  // CUDA 12.1 and later allow 32 KiB

// Return the error and clear it: the runtime would report it again to the next caller of
// cudaGetLastError, who may be another library.
int status(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error;
}

cudaStream_t stream_of(DeviceStream stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t event_of(DeviceEvent event) {
  return static_cast<cudaEvent_t>(event);
}

const char* error_string(int error) {
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int runtime_version(int* version) {
  return status(cudaRuntimeGetVersion(version));
}

int driver_version(int* version) {
  return status(cudaDriverGetVersion(version));
}

int device_count(int* count) {
  *count = 0;
  return status(cudaGetDeviceCount(count));
}

int get_device(int* device) {
  return status(cudaGetDevice(device));
}

int set_device(int device) {
  return status(cudaSetDevice(device));
}

// The runtime has no such query; the driver has, and the runtime has loaded it by then.
int has_context(int device, bool* is_there) {
  using GetDevice = int(int* device, int ordinal);
  using GetState = int(int device, unsigned int* flags, int* is_active);
  *is_there = false;
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (driver == nullptr) return cudaSuccess;
  auto* const find = reinterpret_cast<GetDevice*>(dlsym(driver, "cuDeviceGet"));
  auto* const ask = reinterpret_cast<GetState*>(dlsym(driver, "cuDevicePrimaryCtxGetState"));
  int handle = 0, is_active = 0;
  unsigned int flags = 0;
  const bool has_told = find != nullptr && ask != nullptr && find(&handle, device) == 0 &&
                        ask(handle, &flags, &is_active) == 0;
  dlclose(driver);
  *is_there = has_told && is_active != 0;
  return cudaSuccess;
}

int capability(int device, int* capability) {
  int major = 0, minor = 0;
  const int error =
      status(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  if (error != 0) return error;
  *capability = 10 * major;
  const int last =
      status(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  *capability += minor;
  return last;
}

int multiprocessors(int device, int* number) {
  return status(cudaDeviceGetAttribute(number, cudaDevAttrMultiProcessorCount, device));
}

int allocate(void** memory, size_t bytes) {
  return status(cudaMalloc(memory, bytes));
}

int release(void* memory) {
  return status(cudaFree(memory));
}

int allocate_pinned(void** memory, size_t bytes) {
  return status(cudaHostAlloc(memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
}

int release_pinned(void* memory) {
  return status(cudaFreeHost(memory));
}

int copy(void* to, const void* from, size_t bytes, DeviceStream stream) {
  return status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
}

int create_stream(DeviceStream* stream) {
  int least = 0, greatest = 0;
  const int error = status(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  if (error != 0) return error;
  auto* made = reinterpret_cast<cudaStream_t*>(stream);
  return status(cudaStreamCreateWithPriority(made, cudaStreamNonBlocking, greatest));
}

int destroy_stream(DeviceStream stream) {
  return status(cudaStreamDestroy(stream_of(stream)));
}

int create_event(DeviceEvent* event) {
  auto* made = reinterpret_cast<cudaEvent_t*>(event);
  return status(cudaEventCreateWithFlags(made, cudaEventDisableTiming));
}

int destroy_event(DeviceEvent event) {
  return status(cudaEventDestroy(event_of(event)));
}

int record_event(DeviceEvent event, DeviceStream stream) {
  return status(cudaEventRecord(event_of(event), stream_of(stream)));
}

int query_event(DeviceEvent event, bool* is_complete) {
  const int error = status(cudaEventQuery(event_of(event)));
  *is_complete = error == cudaSuccess;
  return error == cudaErrorNotReady ? 0 : error;
}

int wait_event(DeviceStream stream, DeviceEvent event) {
  return status(cudaStreamWaitEvent(stream_of(stream), event_of(event), cudaEventWaitDefault));
}

int capture_id(DeviceStream stream, uint64_t* id) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  const int error = status(cudaStreamGetCaptureInfo(stream_of(stream), &capture, &number));
  *id = capture == cudaStreamCaptureStatusNone ? 0 : number;
  return error;
}

static_assert(kRelaxedCapture == cudaStreamCaptureModeRelaxed, "the numbers are CUDA's");

int exchange_capture_mode(int* mode) {
  auto exchanged = static_cast<cudaStreamCaptureMode>(*mode);
  const int error = status(cudaThreadExchangeStreamCaptureMode(&exchanged));
  *mode = exchanged;
  return error;
}

uint32_t most_inline_bytes() {
  static const uint32_t most = [] {
    int driver = 0;
    return driver_version(&driver) == 0 && driver >= 12010 ? kMany : kSome;
  }();
  return most;
}

// Load the kernels. CUDA would otherwise do it at their first launch, which then waits for kernels
// in progress, or is part of a capture.
int check_kernels() {
  const void* const kernels[] = {reinterpret_cast<const void*>(combine_kernel),
                                 reinterpret_cast<const void*>(combine_inlined_kernel<kFew>),
                                 reinterpret_cast<const void*>(combine_inlined_kernel<kSome>),
                                 reinterpret_cast<const void*>(combine_inlined_kernel<kMany>)};
  const int launched = most_inline_bytes() < kMany ? 3 : 4;
  for (int i = 0; i < launched; ++i) {
    cudaFuncAttributes attributes;
    if (const int error = status(cudaFuncGetAttributes(&attributes, kernels[i]))) return error;
  }
  if (const int error = load_random_kernels()) return error;
  return load_norm_kernels();
}

int launch(const void* kernel, const void* parameter, uint32_t blocks, DeviceStream stream) {
  void* parameters[] = {const_cast<void*>(parameter)};  // only read
  return status(cudaLaunchKernel(kernel, blocks, CombineArguments::kThreads, parameters, 0,
                                 stream_of(stream)));
}

template <uint32_t kBytes>
int launch_inlined(const CombineArguments& arguments, DeviceStream stream) {
  Inlined<kBytes> inlined;
  inlined.arguments = arguments;
  inlined.views_offset = static_cast<uint32_t>(reinterpret_cast<const char*>(arguments.views) -
                                               reinterpret_cast<const char*>(arguments.jobs));
  memcpy(inlined.tables, arguments.jobs, arguments.inline_bytes);
  return launch(reinterpret_cast<const void*>(combine_inlined_kernel<kBytes>), &inlined,
                arguments.blocks, stream);
}

int launch_combine(const CombineArguments& arguments, DeviceStream stream) {
  if (arguments.blocks == 0) return 0;
  if (arguments.inline_bytes == 0) {
    return launch(reinterpret_cast<const void*>(combine_kernel), &arguments, arguments.blocks,
                  stream);
  }
  if (arguments.inline_bytes <= kFew) return launch_inlined<kFew>(arguments, stream);
  if (arguments.inline_bytes <= kSome) return launch_inlined<kSome>(arguments, stream);
  return launch_inlined<kMany>(arguments, stream);
}

int launch_norm(const NormCall& call, DeviceStream stream) {
  return status(static_cast<cudaError_t>(launch_norm_kernel(call, stream)));
}

DeviceApi make_api() {
  DeviceApi api{};
  api.abi = DeviceApi::kAbi;
  api.name = "cuda";
  api.error_string = error_string;
  api.runtime_version = runtime_version;
  api.driver_version = driver_version;
  api.device_count = device_count;
  api.get_device = get_device;
  api.set_device = set_device;
  api.has_context = has_context;
  api.capability = capability;
  api.multiprocessors = multiprocessors;
  api.check_kernels = check_kernels;
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
  return &api;
}

}  // namespace gpudist
