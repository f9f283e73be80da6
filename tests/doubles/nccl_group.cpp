#include "nccl_group.h"

#include <algorithm>

#include "nccl_checks.h"
#include "stream_double.h"

namespace gpudist::doubles {

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
  const int result = result_ != 0 ? result_ : enqueue_all();
  result_ = 0;
  leave_all();
  return result;
}

// Communicators in the order of their first operations; the messages of one run together.
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
  for (const Launch& launch : all) {
    const int refused = check_launch(*launch.communicator, launch.units);
    if (refused != kNcclSuccess) return refused;
  }
  int result = kNcclSuccess;
  for (const Launch& launch : all) {
    Communicator& communicator = *launch.communicator;
    const DeviceStream stream = launch.units[0][0].stream;
    const uint64_t ticket = communicator.take_ticket();
    enqueue(stream, [&communicator, ticket, units = launch.units]() mutable {
      communicator.wait_for_turn(ticket);
      for (Unit& unit : units) run(communicator, unit);
      communicator.end_turn();
    });
    // On the null stream it has been carried out by now.
    std::string text;
    if (stream == nullptr && !communicator.is_aborted && communicator.error(&text) != 0) {
      set_last_error(text);
      result = communicator.error(&text);
    }
  }
  return result;
}

}  // namespace gpudist::doubles
