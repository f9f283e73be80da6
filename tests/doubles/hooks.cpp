#include "hooks.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace gpudist::doubles {

namespace {

constexpr size_t kMaxLines = 200'000;
// Settings that tests can change, with their defaults.
const std::map<std::string, long> kSettings{
    {"version", 22703},  // of NCCL
    {"devices", 1},
    {"register_limit", 1},       // smallest message, in bytes, that uses registered memory
    {"expandable_segments", 0},  // whether torch's memory is mapped like ncclMemAlloc's
    {"queue_depth", 1024},       // number of works that fit on a stream
    {"asynchronous", 0},         // whether the null stream has a thread like all other streams
};

struct Injection {
  std::string what;
  int rank;
  int after;
};

struct State {
  std::mutex mutex;
  uint64_t lines = 0;
  std::deque<std::string> log;
  std::vector<std::string> violations;
  std::string last_error;
  std::vector<Injection> injections;
  std::map<std::string, int> device_failures;
  std::map<std::string, size_t> counts;
  std::map<std::string, long> settings = kSettings;
  std::atomic<long> clears{0};
  std::condition_variable cleared;
  // The only check on the hot path.
  std::atomic<bool> has_injections{false};
  std::atomic<bool> has_device_failures{false};
};

// Never destroyed: threads of the doubles may outlive main().
State& state() {
  static State& state = *new State;
  return state;
}

// Whether an injected fault of this name occurs now. Each occurs once.
bool fires(const char* what, int rank) {
  std::vector<Injection>& injections = state().injections;
  for (auto it = injections.begin(); it != injections.end(); ++it) {
    if (it->what != what || (it->rank >= 0 && rank >= 0 && it->rank != rank)) continue;
    if (it->after-- > 0) continue;
    injections.erase(it);
    return true;
  }
  return false;
}

void append(State& state, const std::string& line) {
  state.log.push_back(std::to_string(state.lines++) + " " + line);
  if (state.log.size() > kMaxLines) state.log.pop_front();
}

}  // namespace

Fault next_fault(int rank) {
  State& all = state();
  if (!all.has_injections.load(std::memory_order_relaxed)) return Fault::kNone;
  const std::lock_guard<std::mutex> locked(all.mutex);
  Fault fault = Fault::kNone;
  if (fires("async_error", rank)) fault = Fault::kAsyncError;
  if (fires("stall", rank)) fault = Fault::kStall;
  if (fires("delay", rank)) fault = Fault::kDelay;
  if (fires("connect", rank)) fault = Fault::kConnect;
  if (fires("crash", rank)) fault = Fault::kCrash;
  return fault;
}

bool next_call_fails() {
  State& all = state();
  if (!all.has_injections.load(std::memory_order_relaxed)) return false;
  const std::lock_guard<std::mutex> locked(all.mutex);
  return fires("call_error", -1);
}

bool next_init_stalls(int rank) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  return fires("stall_init", rank);
}

bool device_call_fails(const char* name) {
  State& all = state();
  if (!all.has_device_failures.load(std::memory_order_relaxed)) return false;
  const std::lock_guard<std::mutex> locked(all.mutex);
  const auto found = all.device_failures.find(name);
  if (found == all.device_failures.end() || found->second-- > 0) return false;
  all.device_failures.erase(found);
  return true;
}

void count_call(const char* name, size_t times) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  state().counts[name] += times;
}

long clears() {
  return state().clears;
}

void stall_until_cleared(long since) {
  std::unique_lock<std::mutex> locked(state().mutex);
  state().cleared.wait(locked, [since] { return state().clears != since; });
}

long setting(const char* name) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  return state().settings.at(name);
}

void log_call(const std::string& line) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  append(state(), line);
}

void log_violation(const std::string& text) {
  State& all = state();
  const std::lock_guard<std::mutex> locked(all.mutex);
  append(all, "violation " + text);
  all.violations.push_back(text);
  all.last_error = text;
}

int refuse(int result, const std::string& text) {
  log_violation(text);
  return result;
}

void set_last_error(const std::string& text) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  state().last_error = text;
}

std::string last_error() {
  const std::lock_guard<std::mutex> locked(state().mutex);
  return state().last_error;
}

}  // namespace gpudist::doubles

using gpudist::doubles::state;

// Copy as much of the log as fits; returns the total number of bytes.
GPUDIST_EXPORT size_t gpudist_double_log(char* buffer, size_t bytes) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  return gpudist::doubles::copy_lines(state().log, buffer, bytes);
}

// The same for log lines about misuses only.
GPUDIST_EXPORT size_t gpudist_double_violations(char* buffer, size_t bytes) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  return gpudist::doubles::copy_lines(state().violations, buffer, bytes);
}

// Number of completed calls of `name` in this process; only calls that create or destroy something
// on the device are counted.
GPUDIST_EXPORT size_t gpudist_double_count(const char* name) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  return state().counts[name];
}

// Clear the log and all settings and faults.
GPUDIST_EXPORT void gpudist_double_clear() {
  auto& all = state();
  const std::lock_guard<std::mutex> locked(all.mutex);
  all.log.clear();
  all.violations.clear();
  all.last_error.clear();
  all.injections.clear();
  all.device_failures.clear();
  all.has_injections = false;
  all.has_device_failures = false;
  all.settings = gpudist::doubles::kSettings;
  ++all.clears;
  all.cleared.notify_all();
}

// `rank`: rank of the operation in the root communicator of its splits; any rank if negative.
GPUDIST_EXPORT void gpudist_double_inject(const char* what, int rank, int after) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  state().injections.push_back({what, rank, after});
  state().has_injections = true;
}

GPUDIST_EXPORT void gpudist_double_fail_call(const char* name, int after) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  state().device_failures[name] = after;
  state().has_device_failures = true;
}

// Returns false if there is no such setting.
GPUDIST_EXPORT bool gpudist_double_set(const char* name, long value) {
  const std::lock_guard<std::mutex> locked(state().mutex);
  const auto found = state().settings.find(name);
  if (found == state().settings.end()) return false;
  found->second = value;
  return true;
}
