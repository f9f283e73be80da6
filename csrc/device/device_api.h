// Table of the GPU runtime calls that the core uses: CUDA's, or a test double's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/combine.h"
#include "core/norm_kernels.h"
#include "core/random_cells.h"

namespace gpudist {

using DeviceStream = void*;  // a cudaStream_t
using DeviceEvent = void*;   // a cudaEvent_t

// A cudaStreamCaptureMode: graph captures, in any thread, do not forbid calls of this thread.
constexpr int kRelaxedCapture = 2;

// Every call except error_string returns zero or an error code of the runtime.
struct DeviceApi {
  static constexpr int kAbi = 7;

  int abi;  // kAbi with which the table was compiled
  const char* name;
  const char* (*error_string)(int error);
  int (*runtime_version)(int* version);
  int (*driver_version)(int* version);
  int (*device_count)(int* count);
  int (*get_device)(int* device);
  int (*set_device)(int device);
  // Whether this process has a context on a device. Selecting the device would create one.
  int (*has_context)(int device, bool* is_there);
  // Ten times the device's compute capability, such as 90.
  int (*capability)(int device, int* capability);
  int (*multiprocessors)(int device, int* number);
  // Load all kernels for the current device; fails if this build has no code for it.
  int (*check_kernels)();

  int (*allocate)(void** memory, size_t bytes);
  int (*release)(void* memory);
  // Pinned host memory; the device uses the same address.
  int (*allocate_pinned)(void** memory, size_t bytes);
  int (*release_pinned)(void* memory);
  // Stream-ordered copy between any two of device and pinned memory.
  int (*copy)(void* to, const void* from, size_t bytes, DeviceStream stream);

  // A stream of the highest priority that does not synchronize with the default stream.
  int (*create_stream)(DeviceStream* stream);
  int (*destroy_stream)(DeviceStream stream);
  // An event without timing.
  int (*create_event)(DeviceEvent* event);
  int (*destroy_event)(DeviceEvent event);
  int (*record_event)(DeviceEvent event, DeviceStream stream);
  int (*query_event)(DeviceEvent event, bool* is_complete);
  int (*wait_event)(DeviceStream stream, DeviceEvent event);

  // Return 0 if the stream is not being captured into a graph, otherwise the capture's id.
  int (*capture_id)(DeviceStream stream, uint64_t* id);
  // Set the thread's capture mode and return the previous one in `mode`.
  int (*exchange_capture_mode)(int* mode);

  // Largest tables that can be passed as kernel arguments.
  uint32_t (*most_inline_bytes)();
  int (*launch_combine)(const CombineArguments& arguments, DeviceStream stream);
  int (*launch_random)(const RandomArguments& arguments, DeviceStream stream);
  // Does nothing if the call has no blocks of threads.
  int (*launch_norm)(const NormCall& call, DeviceStream stream);
};

// CUDA's table, or null in a build without CUDA.
const DeviceApi* cuda_api();

// Load the table that a test double, the library at this path, exports as gpudist_device_api(). An
// empty path gives CUDA's table. Throws NotBuiltError.
const DeviceApi& device_api(const char* library);

}  // namespace gpudist
