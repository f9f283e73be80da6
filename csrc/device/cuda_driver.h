// The part of the CUDA driver's binary interface, as of driver 525 (CUDA 12.0), that is used here.
// The library is loaded at run time, and the build needs none of its headers: those of later
// versions map names to functions that older drivers lack.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace gpudist {

using CudaContext = void*;     // CUcontext
using CudaModule = void*;      // CUmodule
using CudaFunction = void*;    // CUfunction
using CudaStream = void*;      // CUstream
using CudaEvent = void*;       // CUevent
using CudaAddress = uint64_t;  // CUdeviceptr

// CUresult
constexpr int kCudaInvalidDevice = 101;
constexpr int kCudaNoBinary = 209;
constexpr int kCudaNewerPtx = 222;  // CUDA_ERROR_UNSUPPORTED_PTX_VERSION
constexpr int kCudaNotFound = 500;
constexpr int kCudaNotReady = 600;
constexpr int kCudaNoDriver = -1;  // ours: there is no driver, or it lacks a function

// CUdevice_attribute
constexpr int kCudaMultiprocessors = 16;
constexpr int kCudaCapabilityMajor = 75;
constexpr int kCudaCapabilityMinor = 76;

constexpr unsigned kCudaHostPortable = 1, kCudaHostMapped = 2;  // CU_MEMHOSTALLOC_*
constexpr unsigned kCudaNonBlocking = 1;                        // CU_STREAM_NON_BLOCKING
constexpr unsigned kCudaWithoutTiming = 2;                      // CU_EVENT_DISABLE_TIMING
constexpr int kCudaNoCapture = 0;                               // CU_STREAM_CAPTURE_STATUS_NONE

// Every call returns a CUresult, or kCudaNoDriver.
struct CudaDriver {
  std::string missing;  // why there is no driver; empty if there is one

  int (*init)(unsigned flags);
  int (*driver_get_version)(int* version);
  int (*get_error_string)(int error, const char** text);
  int (*device_get_count)(int* count);
  int (*device_get)(int* device, int ordinal);
  int (*device_get_attribute)(int* value, int attribute, int device);
  int (*primary_ctx_retain)(CudaContext* context, int device);
  int (*ctx_get_current)(CudaContext* context);
  int (*ctx_set_current)(CudaContext context);
  int (*ctx_get_device)(int* device);
  int (*ctx_get_stream_priority_range)(int* least, int* greatest);
  int (*mem_alloc)(CudaAddress* memory, size_t bytes);
  int (*mem_free)(CudaAddress memory);
  int (*mem_host_alloc)(void** memory, size_t bytes, unsigned flags);
  int (*mem_free_host)(void* memory);
  int (*memcpy_async)(CudaAddress to, CudaAddress from, size_t bytes, CudaStream stream);
  int (*stream_create_with_priority)(CudaStream* stream, unsigned flags, int priority);
  int (*stream_destroy)(CudaStream stream);
  int (*stream_wait_event)(CudaStream stream, CudaEvent event, unsigned flags);
  // The graph, its dependencies and their number may be null.
  int (*stream_get_capture_info)(CudaStream stream, int* status, uint64_t* id, void** graph,
                                 const void** dependencies, size_t* count);
  int (*thread_exchange_stream_capture_mode)(int* mode);
  int (*event_create)(CudaEvent* event, unsigned flags);
  int (*event_destroy)(CudaEvent event);
  int (*event_record)(CudaEvent event, CudaStream stream);
  int (*event_query)(CudaEvent event);
  int (*module_load_data)(CudaModule* module, const void* image);
  int (*module_get_function)(CudaFunction* function, CudaModule module, const char* name);
  int (*launch_kernel)(CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       CudaStream stream, void** parameters, void** extra);
};

// X(call, its name in the library)
#define GPUDIST_CUDA_CALLS(X)                                               \
  X(init, cuInit)                                                           \
  X(driver_get_version, cuDriverGetVersion)                                 \
  X(get_error_string, cuGetErrorString)                                     \
  X(device_get_count, cuDeviceGetCount)                                     \
  X(device_get, cuDeviceGet)                                                \
  X(device_get_attribute, cuDeviceGetAttribute)                             \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain)                           \
  X(ctx_get_current, cuCtxGetCurrent)                                       \
  X(ctx_set_current, cuCtxSetCurrent)                                       \
  X(ctx_get_device, cuCtxGetDevice)                                         \
  X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange)             \
  X(mem_alloc, cuMemAlloc_v2)                                               \
  X(mem_free, cuMemFree_v2)                                                 \
  X(mem_host_alloc, cuMemHostAlloc)                                         \
  X(mem_free_host, cuMemFreeHost)                                           \
  X(memcpy_async, cuMemcpyAsync)                                            \
  X(stream_create_with_priority, cuStreamCreateWithPriority)                \
  X(stream_destroy, cuStreamDestroy_v2)                                     \
  X(stream_wait_event, cuStreamWaitEvent)                                   \
  X(stream_get_capture_info, cuStreamGetCaptureInfo_v2)                     \
  X(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode) \
  X(event_create, cuEventCreate)                                            \
  X(event_destroy, cuEventDestroy_v2)                                       \
  X(event_record, cuEventRecord)                                            \
  X(event_query, cuEventQuery)                                              \
  X(module_load_data, cuModuleLoadData)                                     \
  X(module_get_function, cuModuleGetFunction)                               \
  X(launch_kernel, cuLaunchKernel)

constexpr int kMostDevices = 128;

// The driver of this process; not initialized.
const CudaDriver& cuda_driver();

// Ten times the device's compute capability, such as 90.
int capability_of(const CudaDriver& driver, int device, int* capability);

}  // namespace gpudist
