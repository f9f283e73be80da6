#include "nccl/operations.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "core/errors.h"
#include "device/device.h"

namespace gpudist {

namespace {

using Lock = std::unique_lock<std::mutex>;
constexpr auto kPeriod = std::chrono::milliseconds(20);
constexpr auto kShortPeriod = std::chrono::milliseconds(1);
// With no operation in flight; the next one wakes the thread.
constexpr auto kPeriodAtRest = std::chrono::milliseconds(500);
// A query that takes longer than this means that the thread is stuck in the driver.
constexpr auto kStuck = std::chrono::seconds(2);
constexpr size_t kRemembered = 64;

double seconds_since(Operations::Clock::time_point start) {
  return std::chrono::duration<double>(Operations::Clock::now() - start).count();
}

}  // namespace

Operations::Operations(const DeviceApi& api, int device)
    : api_(api), device_(device), state_(std::make_shared<State>(api)) {
  thread_ = std::thread([state = state_, device] {
    set_device(state->api, device);
    // the releases below may happen during another thread's capture
    const RelaxedCapture relaxed(state->api);
    state->ask();
  });
}

Operations::~Operations() {
  stop();
}

std::vector<void*> Operations::stop() {
  Lock locked(state_->mutex);
  state_->is_stopping = true;
  state_->changed.notify_all();
  if (thread_.joinable()) {
    if (state_->changed.wait_for(locked, kStuck, [this] { return state_->has_stopped; })) {
      locked.unlock();
      thread_.join();
      locked.lock();
    } else {
      thread_.detach();
      return {};
    }
  }
  const DeviceGuard guard(api_, device_, std::nothrow);
  for (const Operation& operation : state_->operations) {
    if (operation.event != nullptr) api_.destroy_event(operation.event);
  }
  state_->operations.clear();
  for (DeviceEvent event : state_->idle_events) api_.destroy_event(event);
  state_->idle_events.clear();
  std::vector<void*> memory = std::move(state_->kept);
  for (const Discarded& discarded : state_->discarded) memory.push_back(discarded.memory);
  state_->discarded.clear();
  return memory;
}

uint64_t Operations::begin(const std::string& label) {
  const Lock locked(state_->mutex);
  auto& operations = state_->operations;
  while (operations.size() > kRemembered && operations.front().is_complete) operations.pop_front();
  operations.push_back({state_->begun++, label, Clock::now()});
  state_->wake();
  return operations.back().number;
}

void Operations::follow(DeviceStream stream) {
  DeviceEvent last = nullptr;
  {
    const Lock locked(state_->mutex);
    const Operation* const found = state_->last_on_a_stream();
    if (found == nullptr) return;
    last = found->event;
  }
  // Wait on the same stream, too: a new stream may have the handle of a destroyed one.
  check_device(api_, api_.wait_event(stream, last), "waiting for an event");
}

void Operations::enqueued(uint64_t number, DeviceStream stream) {
  DeviceEvent event = nullptr;
  {
    const Lock locked(state_->mutex);
    if (!state_->idle_events.empty()) {
      event = state_->idle_events.back();
      state_->idle_events.pop_back();
    }
  }
  if (event == nullptr) {
    check_device(api_, api_.create_event(&event), "creating an event");
  }
  const int error = api_.record_event(event, stream);
  const Lock locked(state_->mutex);
  Operation* const operation = error == 0 ? state_->find(number) : nullptr;
  if (operation == nullptr) {
    state_->idle_events.push_back(event);
  } else {
    operation->event = event;
  }
  check_device(api_, error, "recording an event");
}

void Operations::drop(uint64_t number) {
  const Lock locked(state_->mutex);
  Operation* const operation = state_->find(number);
  if (operation == nullptr || operation->is_complete) return;
  operation->is_complete = true;
  if (operation->event != nullptr) state_->idle_events.push_back(operation->event);
  operation->event = nullptr;
}

void Operations::wait(uint64_t number, const Look& check, const Look& check_signals) {
  for (int looks = 1;; ++looks) {
    check();
    if (looks % 64 == 0) check_signals();
    Lock locked(state_->mutex);
    {
      const DeviceGuard guard(api_, device_, std::nothrow);
      state_->retire(locked);
    }
    const Operation* const operation = state_->find(number);
    // A failure also completes it, by aborting it.
    if (operation == nullptr || operation->is_complete) return check();
    // Poll often at first: most waits are for a few microseconds of device work.
    const auto pause = std::chrono::microseconds(looks < 100 ? 5 : looks < 1000 ? 50 : 1000);
    state_->changed.wait_for(locked, pause);
  }
}

void Operations::wait_for_all(const Look& check, const Look& check_signals) {
  uint64_t last = 0;
  {
    const Lock locked(state_->mutex);
    const Operation* const found = state_->last_on_a_stream();
    if (found == nullptr) return;
    last = found->number;
  }
  wait(last, check, check_signals);
}

bool Operations::drain(Clock::time_point deadline, const std::function<bool()>& gives_up) {
  Lock locked(state_->mutex);
  ++state_->waiting;
  state_->changed.notify_all();
  while (!state_->is_idle() && !gives_up() && Clock::now() < deadline) {
    state_->changed.wait_for(locked, kShortPeriod);
  }
  --state_->waiting;
  return state_->is_idle();
}

std::optional<Operations::Late> Operations::find_late(Clock::duration timeout) {
  const Lock locked(state_->mutex);
  const auto now = Clock::now();
  for (Operation& operation : state_->operations) {
    if (operation.is_complete) continue;
    if (now - operation.start <= timeout) break;
    const bool is_new = !operation.is_reported;
    operation.is_reported = true;
    return Late{operation.label, is_new};
  }
  return std::nullopt;
}

double Operations::oldest_s() const {
  const Lock locked(state_->mutex);
  for (const Operation& operation : state_->operations) {
    if (!operation.is_complete) return seconds_since(operation.start);
  }
  return 0;
}

std::vector<std::string> Operations::lines(size_t last) const {
  const Lock locked(state_->mutex);
  std::vector<std::string> lines;
  const auto& operations = state_->operations;
  const size_t first = operations.size() > last ? operations.size() - last : 0;
  for (size_t i = first; i < operations.size(); ++i) {
    const Operation& operation = operations[i];
    char text[64];
    std::snprintf(text, sizeof(text), operation.is_complete ? "finished" : "waiting for %.1f s",
                  seconds_since(operation.start));
    lines.push_back("#" + std::to_string(operation.number) + " " + operation.label + ": " + text);
  }
  return lines;
}

void Operations::discard(void* memory) {
  if (memory == nullptr) return;
  if (has_stopped_) return release_beside(memory);
  const Lock locked(state_->mutex);
  state_->discarded.push_back({memory, state_->begun});
  state_->wake();
}

void Operations::give_back(void* memory, const Look& check, const Look& check_signals) {
  Lock locked(state_->mutex);
  const Operation* const last = state_->last_on_a_stream();
  state_->discarded.push_back({memory, last == nullptr ? 0 : last->number + 1});
  const auto is_there = [&] {
    const auto is_it = [=](const Discarded& one) { return one.memory == memory; };
    const auto& all = state_->discarded;
    return state_->is_releasing || std::any_of(all.begin(), all.end(), is_it);
  };
  for (int looks = 1; is_there() && !state_->is_stopping; ++looks) {
    state_->changed.notify_all();  // wakes the polling thread
    locked.unlock();
    check();
    if (looks % 64 == 0) check_signals();
    locked.lock();
    state_->changed.wait_for(locked, kShortPeriod);
  }
}

void Operations::keep(void* memory) {
  if (memory == nullptr) return;
  if (has_stopped_) return release_beside(memory);
  const Lock locked(state_->mutex);
  state_->kept.push_back(memory);
}

void Operations::release_beside(void* memory) const {
  std::thread([&api = api_, device = device_, memory] {
    set_device(api, device);
    const RelaxedCapture relaxed(api);
    api.release(memory);
  }).detach();
}

std::optional<std::string> Operations::next_error() {
  const Lock locked(state_->mutex);
  if (state_->error.empty() || state_->has_told_error) return std::nullopt;
  state_->has_told_error = true;
  return state_->error;
}

Operations::Operation* Operations::State::find(uint64_t number) {
  // The operation is usually one of the last.
  const auto found = std::find_if(operations.rbegin(), operations.rend(),
                                  [=](const Operation& one) { return one.number == number; });
  return found == operations.rend() ? nullptr : &*found;
}

const Operations::Operation* Operations::State::last_on_a_stream() const {
  const auto found = std::find_if(operations.rbegin(), operations.rend(),
                                  [](const Operation& one) { return one.event != nullptr; });
  return found == operations.rend() ? nullptr : &*found;
}

bool Operations::State::is_idle() const {
  return std::all_of(operations.begin(), operations.end(),
                     [](const Operation& one) { return one.is_complete; });
}

void Operations::State::ask() {
  Lock locked(mutex);
  while (!is_stopping) {
    retire(locked);
    release(locked);
    if (is_stopping) break;
    rests = waiting == 0 && discarded.empty() && is_idle();
    changed.wait_for(locked, rests ? kPeriodAtRest : waiting > 0 ? kShortPeriod : kPeriod);
  }
  has_stopped = true;
  changed.notify_all();
}

void Operations::State::wake() {
  if (std::exchange(rests, false)) changed.notify_all();
}

// Operations end in order. Query the oldest first, since it is usually still running, then the
// newest, then bisect. The lock is released during the driver's calls.
void Operations::State::retire(Lock& locked) {
  std::vector<std::pair<uint64_t, DeviceEvent>> asked;
  for (const Operation& operation : operations) {
    if (operation.event != nullptr) asked.emplace_back(operation.number, operation.event);
  }
  if (asked.empty()) return;
  locked.unlock();
  // Another thread may be capturing a graph, which a query from this thread would invalidate.
  std::optional<RelaxedCapture> relaxed(api);
  // `complete`: number of the first ones known to be complete
  size_t complete = 0, unknown = asked.size();
  int failed = 0;
  for (size_t next = 0; complete < unknown;) {
    bool is_complete = false;
    failed = api.query_event(asked[next].second, &is_complete);
    if (failed != 0) break;
    const bool was_oldest = complete == 0;
    if (is_complete) {
      complete = next + 1;
    } else {
      unknown = next;
    }
    next = was_oldest && is_complete ? unknown - 1 : complete + (unknown - complete) / 2;
  }
  relaxed.reset();
  locked.lock();
  if (failed != 0 && error.empty()) {
    error = std::string("asking for an operation: ") + api.error_string(failed);
  }
  if (complete == 0) return;
  for (Operation& operation : operations) {
    if (operation.number > asked[complete - 1].first) break;
    if (operation.event == nullptr) continue;
    operation.is_complete = true;
    idle_events.push_back(operation.event);
    operation.event = nullptr;
  }
  changed.notify_all();
}

void Operations::State::release(Lock& locked) {
  const auto under_way = std::find_if(operations.begin(), operations.end(),
                                      [](const Operation& one) { return !one.is_complete; });
  const uint64_t first = under_way == operations.end() ? begun : under_way->number;
  const auto unused = std::partition(discarded.begin(), discarded.end(),
                                     [=](const Discarded& one) { return one.begun > first; });
  const std::vector<Discarded> released(unused, discarded.end());
  discarded.erase(unused, discarded.end());
  if (released.empty()) return;
  is_releasing = true;
  locked.unlock();
  for (const Discarded& one : released) api.release(one.memory);
  locked.lock();
  is_releasing = false;
  changed.notify_all();
}

}  // namespace gpudist
