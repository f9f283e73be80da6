// What tests ask of the doubles: a log of the calls, faults at chosen calls. All of it belongs to
// this process. These are doubles: nothing they measure or print is a result of CUDA or NCCL.
#pragma once

#include <string>

#define GPUDIST_EXPORT extern "C" __attribute__((visibility("default")))

namespace gpudist::doubles {

// What a test wants to happen in an operation.
enum class Fault { kNone, kAsyncError, kStall, kDelay, kCrash };

// For the next operation of a rank.
Fault next_fault(int rank);
// Whether the next call of NCCL fails.
bool next_call_fails();
// Whether the next initialisation never returns.
bool next_init_stalls(int rank);
// Whether the next call of this entry of the device's table fails.
bool device_call_fails(const char* name);
// That a call of the device's table, which makes or ends something, has been carried out.
void count_call(const char* name);
// Return when the hooks are cleared.
void stall_until_cleared();

int nccl_version();
int device_count();

// A line of the log, after its number.
void log_call(const std::string& line);
// A line of the log that tells of a misuse, as `text`; also the text of the last error.
void log_violation(const std::string& text);
// log_violation(), and `result`.
int refuse(int result, const std::string& text);
void set_last_error(const std::string& text);
std::string last_error();

}  // namespace gpudist::doubles
