#include "nccl_group.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "device_double.h"
#include "hooks.h"
#include "nccl_checks.h"
#include "nccl_ends.h"
#include "stream_double.h"

namespace gpudist::doubles {

namespace {

constexpr auto kCleaningUp = std::chrono::milliseconds(20);

// Work for a stream, which takes its turn among the communicator's works now.
std::function<void()> work_of(Communicator& communicator, std::vector<Unit> units) {
  const uint64_t ticket = communicator.take_ticket();
  return [&communicator, ticket, units = std::move(units)]() mutable {
    communicator.wait_for_turn(ticket);
    for (Unit& unit : units) run(communicator, unit);
    communicator.end_turn();
  };
}

}  // namespace

Group& this_group() {
  static thread_local Group group;
  return group;
}

bool group_uses(DeviceStream stream) {
  return this_group().uses(stream);
}

Group::~Group() {
  if (depth_ > 0) log_violation("a thread ended with an open group");
}

void Group::add(Communicator& communicator, const Operation& operation) {
  entries_.push_back({&communicator, operation});
}

bool Group::uses(const Communicator& communicator) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.communicator == &communicator; });
}

bool Group::uses(DeviceStream stream) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.operation.stream == stream; });
}

void Group::leave_all() {
  for (const Entry& entry : entries_) entry.communicator->leave();
  entries_.clear();
}

void Group::fail(int result) {
  if (depth_ > 0 && result_ == 0) result_ = result;
  leave_all();
}

int Group::end() {
  if (depth_ == 0) return refuse(kNcclInvalidUsage, "group_end: no group is open");
  if (--depth_ > 0) return kNcclSuccess;
  int result = result_;
  result_ = 0;
  if (!entries_.empty()) need_context("ncclGroupEnd");
  if (result == kNcclSuccess) result = connect_all();
  if (result == kNcclSuccess) result = enqueue_all();
  leave_all();
  std::vector<Communicator*> aborts;
  aborts.swap(aborts_);
  for (Communicator* communicator : aborts) {
    const int refused = finish_abort(*communicator);
    if (refused != kNcclSuccess) result = refused;
  }
  return result;
}

// The host waits for the first message to a peer, because it sets up the connection.
int Group::connect_all() {
  for (const Entry& entry : entries_) {
    if (entry.operation.fault != Fault::kConnect) continue;
    Communicator& communicator = *entry.communicator;
    communicator.wire()->wait(communicator.rank, communicator.is_aborted, [] { return false; });
    // NCCL cleans up operations it has started.
    std::this_thread::sleep_for(kCleaningUp);
    set_last_error("group_end: a peer of " + communicator.name + " does not connect");
    return kRemoteError;
  }
  return kNcclSuccess;
}

// Communicators in the order of their first operations. Messages of one communicator run together.
std::vector<Group::Launch> Group::launches() const {
  std::vector<Launch> launches;
  for (const Entry& entry : entries_) {
    auto launch = std::find_if(launches.begin(), launches.end(), [&](const Launch& other) {
      return other.communicator == entry.communicator;
    });
    if (launch == launches.end()) launch = launches.insert(launch, {entry.communicator, {}});
    auto unit = launch->units.end();
    if (is_message(entry.operation.kind)) {
      unit = std::find_if(launch->units.begin(), launch->units.end(),
                          [](const Unit& other) { return is_message(other[0].kind); });
    }
    if (unit == launch->units.end()) unit = launch->units.insert(unit, Unit{});
    unit->push_back(entry.operation);
  }
  return launches;
}

int Group::enqueue_all() {
  const std::vector<Launch> all = launches();
  if (!all.empty()) count_call("nccl_group");
  for (const Launch& launch : all) {
    const int refused = check_launch(*launch.communicator, launch.units);
    if (refused != kNcclSuccess) return refused;
  }
  std::vector<std::function<void()>> immediate;
  for (const Launch& launch : all) {
    Communicator& communicator = *launch.communicator;
    const DeviceStream stream = launch.units[0][0].stream;
    if (const auto graph = graph_of(stream)) {
      communicator.add_graph();
      graph->keep([&communicator] { communicator.drop_graph(); });
      graph->add(stream, [&communicator, units = launch.units](DeviceStream other) {
        enqueue(other, work_of(communicator, units));
      });
    } else if (is_immediate(stream)) {
      immediate.push_back(work_of(communicator, launch.units));
    } else {
      enqueue(stream, work_of(communicator, launch.units));
    }
  }
  // From here on the device works, and this thread leaves the NCCL calls.
  leave_all();
  for (const auto& work : immediate) work();
  int result = kNcclSuccess;
  for (const Launch& launch : all) {
    // Work on the null stream has finished by now.
    Communicator& communicator = *launch.communicator;
    std::string text;
    if (is_immediate(launch.units[0][0].stream) && !communicator.is_aborted &&
        communicator.error(&text) != 0) {
      set_last_error(text);
      result = communicator.error(&text);
    }
  }
  return result;
}

}  // namespace gpudist::doubles
