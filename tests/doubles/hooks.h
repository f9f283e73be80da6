// What tests ask of the doubles: a log of the calls, faults at chosen calls. All of it belongs to
// this process. These are doubles: nothing they measure or print is a result of CUDA or NCCL.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>

#define GPUDIST_EXPORT extern "C" __attribute__((visibility("default")))

namespace gpudist::doubles {

// What a test wants to happen in an operation.
enum class Fault { kNone, kAsyncError, kStall, kDelay, kConnect, kCrash };

// For the next operation of a rank.
Fault next_fault(int rank);
// Whether the next call of NCCL fails.
bool next_call_fails();
// Whether the next initialisation never returns.
bool next_init_stalls(int rank);
// Whether the next call of this entry of the device's table fails.
bool device_call_fails(const char* name);
// That a call of the device's table, or what it asks for, has been carried out.
void count_call(const char* name);
// How often the hooks were cleared.
long clears();
// Return when they have been cleared once more than so often.
void stall_until_cleared(long since);

// What a test has set; hooks.cpp has the names.
long setting(const char* name);

// A line of the log, after its number.
void log_call(const std::string& line);
// A line of the log that tells of a misuse, as `text`; also the text of the last error.
void log_violation(const std::string& text);
// log_violation(), and `result`.
int refuse(int result, const std::string& text);
void set_last_error(const std::string& text);
std::string last_error();

// As many lines as there is room for; returns how many bytes all of them have.
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
