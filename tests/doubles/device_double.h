// Devices of the double of CUDA's runtime: which one each thread has chosen, where the process has
// a context, and what a call has to get past.
#pragma once

#include <mutex>
#include <string>

namespace gpudist::doubles {

// Of cudaError_t.
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

// Of this thread; 0 until it chooses.
int current_device();
// Makes a context there. An error where there is no such device.
int choose_device(int device);
bool has_context(int device);
// Make a context on the thread's current device, if there is none, as every call does that needs
// one.
void need_context(const char* call);

// Held by a call that waits for room on a stream; every other call waits for it meanwhile.
std::mutex& driver_lock();

// What a call that needs a context begins with: an error that a test has asked for, or that of
// pass_driver().
int begin_call(const char* call);
// Make the context, and wait for the driver's lock. The error is one that a kernel has left for
// good.
int pass_driver(const char* call);

// Let every later call fail, until the hooks are cleared: a kernel has touched memory that has
// ended.
void break_device(const std::string& text);
bool is_device_broken();

}  // namespace gpudist::doubles
