// Devices of the CUDA runtime double: the current device of each thread, the process's contexts,
// and the checks at the start of a call.
#pragma once

#include <mutex>
#include <string>

namespace gpudist::doubles {

// Value of cudaError_t.
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kInvalidDevice = 101;
constexpr int kNoKernelImage = 209;
constexpr int kInvalidHandle = 400;
constexpr int kIllegalAddress = 700;
constexpr int kCaptureUnsupported = 900;
constexpr int kCaptureUnjoined = 904;
constexpr int kCaptureIsolation = 905;
constexpr int kCapturedEvent = 907;
constexpr int kUnknown = 999;

const char* error_string(int error);

// Current device of this thread; 0 until it chooses one.
int current_device();
// Select a device and create its context. Returns an error if there is no such device.
int choose_device(int device);
bool has_context(int device);
// Create a context on the thread's current device unless it has one, as every call that needs a
// context does.
void need_context(const char* call);

// Held by a call that waits for room on a stream; all other calls wait for it meanwhile.
std::mutex& driver_lock();

// Start a call that needs a context. Returns an error requested by a test, or that of
// pass_driver().
int begin_call(const char* call);
// Create the context and wait for the driver's lock. Returns the sticky error that a kernel has
// left, if any.
int pass_driver(const char* call);

// Make every later call fail until the hooks are cleared, because a kernel has used memory after
// its release.
void break_device(const std::string& text);
bool is_device_broken();

}  // namespace gpudist::doubles
