// Table of the GPU calls that the core uses: the CUDA driver's, or a test double's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/combine.h"
#include "core/norm_kernels.h"
#include "core/random_cells.h"

namespace gpudist {

using DeviceContext = void*;  // a CUcontext
using DeviceStream = void*;   // a CUstream, which is a cudaStream_t too
using DeviceEvent = void*;    // a CUevent

// A CUstreamCaptureMode: graph captures, in any thread, do not forbid calls of this thread.
constexpr int kRelaxedCapture = 2;

// Every call except error_string returns zero or an error code of the driver.
struct DeviceApi {
  static constexpr int kAbi = 9;

  int abi;  // kAbi with which the table was compiled
  const char* name;
  const char* (*error_string)(int error);
  int (*compiler_version)(int* version);
  int (*driver_version)(int* version);
  int (*device_count)(int* count);
  // The context of a device that all libraries of this process share; made if there is none.
  int (*context_of)(int device, DeviceContext* context);
  // The calling thread's context, null if it has none. Each call is for the device of that context.
  int (*get_context)(DeviceContext* context);
  int (*set_context)(DeviceContext context);
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
