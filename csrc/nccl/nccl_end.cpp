// Ending a world over NCCL, after a failure or normally.
#include "device/device.h"
#include "nccl/nccl_world.h"

namespace gpudist {

namespace {

using Lock = std::lock_guard<std::mutex>;

}  // namespace

std::vector<NcclComm> NcclWorld::take_communicators() {
  std::vector<NcclComm> comms;
  for (auto it = communicators_.rbegin(); it != communicators_.rend(); ++it) {
    if (const NcclComm comm = (*it)->take()) comms.push_back(comm);
  }
  return comms;
}

void NcclWorld::abort_all() {
  const Lock locked(communicators_mutex_);
  if (aborting_ != nullptr) return;
  const std::vector<NcclComm> comms = take_communicators();
  if (comms.empty()) {
    aborting_ = std::make_shared<Beside>();
    aborting_->reach(Beside::Milestone::kDone);
  } else {
    aborting_ = abort_communicators(on_, comms);
  }
}

void NcclWorld::close(double seconds) {
  if (is_closed_.exchange(true)) return;
  const auto deadline =
      Watchdog::Clock::now() +
      std::chrono::duration_cast<Watchdog::Clock::duration>(std::chrono::duration<double>(seconds));
  const bool is_idle = operations_->drain(deadline, [this] { return watchdog_.has_failed(); });
  if (!is_idle || watchdog_.has_failed()) abort_all();
  std::shared_ptr<Beside> ending;
  {
    const Lock locked(communicators_mutex_);
    ending = aborting_;
    if (ending == nullptr) {
      const std::vector<NcclComm> comms = take_communicators();
      if (!comms.empty()) ending = release_communicators(on_, comms);
    }
  }
  const bool has_ended = ending == nullptr || ending->wait(Beside::Milestone::kDone, deadline);
  watchdog_.stop();
  std::vector<void*> memory = operations_->stop();
  std::vector<void*> pinned{watchdog_.take_failed_word(), pinned_.take()};
  // Running kernels or existing graphs may still use the memory.
  if (!has_ended) return;
  const std::lock_guard<std::recursive_mutex> locked(mutex_);
  if (is_inside_) return;  // a handler closes the world below a call that uses the memory
  operations_->set_idle();
  const DeviceGuard guard(device_api_, device_, std::nothrow);
  for (DeviceEvent event : idle_events_) device_api_.destroy_event(event);
  idle_events_.clear();
  for (const auto& [capture, event] : captured_) device_api_.destroy_event(event);
  captured_.clear();
  if (beside_ != nullptr) device_api_.destroy_stream(beside_);
  has_started_ = false;
  if (void* const piece = staging_.take()) memory.push_back(piece);
  guards_.clear();
  release_memory(on_, std::move(memory), std::move(pinned))
      ->wait(Beside::Milestone::kDone, deadline);
}

}  // namespace gpudist
