// Controls for tests of the doubles: a log of calls, and faults at chosen calls. All state belongs
// to this process. Nothing that doubles measure or print is a result of CUDA or NCCL.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#define GPUDIST_EXPORT extern "C" __attribute__((visibility("default")))

namespace gpudist::doubles {

// Fault to inject into an operation.
enum class Fault { kNone, kAsyncError, kStall, kDelay, kConnect, kCrash };

// Fault for the next operation of a rank.
Fault next_fault(int rank);
// Whether the next call of NCCL fails.
bool next_call_fails();
// Whether the next initialisation never returns.
bool next_init_stalls(int rank);
// Whether the next call of this entry of the device's table fails.
bool device_call_fails(const char* name);
// Count a call of the device's table once it, or the work it enqueues, has run; or several of
// something else.
void count_call(const char* name, size_t times = 1);
// Number of times that the hooks have been cleared.
long clears();
// Wait until clears() is no longer `since`.
void stall_until_cleared(long since);

// Value of a setting; see hooks.cpp for the names.
long setting(const char* name);

// Append a numbered line to the log.
void log_call(const std::string& line);
// Log a misuse, and make `text` the last error.
void log_violation(const std::string& text);
// Log a misuse and return `result`.
int refuse(int result, const std::string& text);
void set_last_error(const std::string& text);
std::string last_error();

// Copy as many lines as fit; returns the total number of bytes.
template <class Lines>
size_t copy_lines(const Lines& lines, char* buffer, size_t bytes) {
  size_t total = 0;
  for (const std::string& line : lines) {
    const std::string text = line + "\n";
    if (total < bytes) memcpy(buffer + total, text.data(), std::min(text.size(), bytes - total));
    total += text.size();
  }
  return total;
}

}  // namespace gpudist::doubles
