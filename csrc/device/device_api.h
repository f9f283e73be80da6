// The calls we make of a GPU's runtime, as a table: CUDA's, or a test double's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/combine.h"

namespace gpudist {

using DeviceStream = void*;  // a cudaStream_t
using DeviceEvent = void*;   // a cudaEvent_t

// A cudaStreamCaptureMode: a capture, in whatever thread, refuses no call of this one.
constexpr int kRelaxedCapture = 2;

// Every call but the texts returns zero, or one of the runtime's error codes.
struct DeviceApi {
  static constexpr int kAbi = 6;

  int abi;  // kAbi of the table's maker
  const char* name;
  const char* (*error_string)(int error);
  int (*runtime_version)(int* version);
  int (*driver_version)(int* version);
  int (*device_count)(int* count);
  int (*get_device)(int* device);
  int (*set_device)(int device);
  // Whether this process has a context on a device: to make a device current makes one.
  int (*has_context)(int device, bool* is_there);
  // Ten times the compute capability of a device, such as 90.
  int (*capability)(int device, int* capability);
  // Whether this build has code for the current device.
  int (*check_kernels)();

  int (*allocate)(void** memory, size_t bytes);
  int (*release)(void* memory);
  // Of the host, and the device reads and writes it at the same address.
  int (*allocate_pinned)(void** memory, size_t bytes);
  int (*release_pinned)(void* memory);
  // In stream order, between any two of device and pinned memory.
  int (*copy)(void* to, const void* from, size_t bytes, DeviceStream stream);

  // Of the highest priority, and independent of the default stream.
  int (*create_stream)(DeviceStream* stream);
  int (*destroy_stream)(DeviceStream stream);
  // Without timing.
  int (*create_event)(DeviceEvent* event);
  int (*destroy_event)(DeviceEvent event);
  int (*record_event)(DeviceEvent event, DeviceStream stream);
  int (*query_event)(DeviceEvent event, bool* is_complete);
  int (*wait_event)(DeviceStream stream, DeviceEvent event);

  // Zero where the stream is not being captured into a graph, else a number of the capture.
  int (*capture_id)(DeviceStream stream, uint64_t* id);
  // Set which calls this thread may make while a graph is being captured, and tell what it was.
  int (*exchange_capture_mode)(int* mode);

  // Most bytes of tables that travel with a launch.
  uint32_t (*most_inline_bytes)();
  int (*launch_combine)(const CombineArguments& arguments, DeviceStream stream);
};

// CUDA's, or null where this build has no CUDA half.
const DeviceApi* cuda_api();

// The table that `library`, the path of a test double, exports as gpudist_device_api(); CUDA's for
// an empty path. Throws NotBuiltError.
const DeviceApi& device_api(const char* library);

}  // namespace gpudist
