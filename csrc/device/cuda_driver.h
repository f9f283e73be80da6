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

// X(call, its name in the library, arguments)
#define GPUDIST_CUDA_CALLS(X)                                                                    \
  X(init, cuInit, (unsigned flags))                                                              \
  X(driver_get_version, cuDriverGetVersion, (int* version))                                      \
  X(get_error_string, cuGetErrorString, (int error, const char** text))                          \
  X(device_get_count, cuDeviceGetCount, (int* count))                                            \
  X(device_get, cuDeviceGet, (int* device, int ordinal))                                         \
  X(device_get_attribute, cuDeviceGetAttribute, (int* value, int attribute, int device))         \
  X(primary_ctx_retain, cuDevicePrimaryCtxRetain, (CudaContext*, int device))                    \
  X(ctx_get_current, cuCtxGetCurrent, (CudaContext*))                                            \
  X(ctx_set_current, cuCtxSetCurrent, (CudaContext context))                                     \
  X(ctx_get_device, cuCtxGetDevice, (int* device))                                               \
  X(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange, (int* least, int* greatest))     \
  X(mem_alloc, cuMemAlloc_v2, (CudaAddress*, size_t bytes))                                      \
  X(mem_free, cuMemFree_v2, (CudaAddress memory))                                                \
  X(mem_host_alloc, cuMemHostAlloc, (void** memory, size_t bytes, unsigned flags))               \
  X(mem_free_host, cuMemFreeHost, (void* memory))                                                \
  X(memcpy_async, cuMemcpyAsync,                                                                 \
    (CudaAddress to, CudaAddress from, size_t bytes, CudaStream stream))                         \
  X(stream_create_with_priority, cuStreamCreateWithPriority,                                     \
    (CudaStream*, unsigned flags, int priority))                                                 \
  X(stream_destroy, cuStreamDestroy_v2, (CudaStream stream))                                     \
  X(stream_wait_event, cuStreamWaitEvent, (CudaStream stream, CudaEvent event, unsigned flags))  \
  X(stream_get_capture_info, cuStreamGetCaptureInfo_v2,                                          \
    (CudaStream stream, int* status, uint64_t* id, void** graph, const void** dependencies,      \
     size_t* count))                                                                             \
  X(thread_exchange_stream_capture_mode, cuThreadExchangeStreamCaptureMode, (int* mode))         \
  X(event_create, cuEventCreate, (CudaEvent*, unsigned flags))                                   \
  X(event_destroy, cuEventDestroy_v2, (CudaEvent event))                                         \
  X(event_record, cuEventRecord, (CudaEvent event, CudaStream stream))                           \
  X(event_query, cuEventQuery, (CudaEvent event))                                                \
  X(module_load_data, cuModuleLoadData, (CudaModule*, const void* image))                        \
  X(module_get_function, cuModuleGetFunction,                                                    \
    (CudaFunction*, CudaModule module, const char* name))                                        \
  X(launch_kernel, cuLaunchKernel,                                                               \
    (CudaFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, \
     unsigned block_y, unsigned block_z, unsigned shared_bytes, CudaStream stream,               \
     void** parameters, void** extra))

// Every call returns a CUresult, or kCudaNoDriver.
struct CudaDriver {
  std::string missing;  // why there is no driver; empty if there is one
// NOLINTNEXTLINE(bugprone-macro-parentheses): neither a name nor a list of arguments can have them
#define GPUDIST_MEMBER(call, symbol, arguments) int(*call) arguments;
  GPUDIST_CUDA_CALLS(GPUDIST_MEMBER)
#undef GPUDIST_MEMBER
};

constexpr int kMostDevices = 128;

// The driver of this process, initialized at the first call.
const CudaDriver& cuda_driver();

// Ten times the device's compute capability, such as 90.
int capability_of(const CudaDriver& driver, int device, int* capability);

}  // namespace gpudist
