// Devices of the double of CUDA's driver: the context of each thread, the process's contexts, and
// the checks at the start of a call.
#pragma once

#include <mutex>
#include <string>

#include "device/device_api.h"

namespace gpudist::doubles {

// Value of CUresult.
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kInvalidContext = 201;
constexpr int kNoKernelImage = 209;
constexpr int kInvalidHandle = 400;
constexpr int kIllegalAddress = 700;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureUnjoined = 904;
constexpr int kCaptureIsolation = 905;
constexpr int kCapturedEvent = 907;
constexpr int kUnknown = 999;

const char* error_string(int error);

// Device of this thread's context; 0 if it has none, as for CUDA's runtime.
int current_device();
int context_of(int device, DeviceContext* context);
int get_context(DeviceContext* context);
int set_context(DeviceContext context);
// Give the thread a context, as NCCL's and torch's calls do by CUDA's runtime.
void need_context(const char* call);

// Held by a call that waits for room on a stream; all other calls wait for it meanwhile.
std::mutex& driver_lock();

// Start a call that needs a context. Returns an error requested by a test, or that of
// pass_driver().
int begin_call(const char* call);
// Wait for the driver's lock. Refuses a thread without a context. Returns the sticky error that a
// kernel has left, if any.
int pass_driver(const char* call);

// Make every later call fail until the hooks are cleared, because a kernel has used memory after
// its release.
void break_device(const std::string& text);
bool is_device_broken();

}  // namespace gpudist::doubles
