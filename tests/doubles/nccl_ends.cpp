// Ends of communicators. Like NCCL, each waits for graphs that contain works of the communicator.
// An abort frees memory that other threads may still use: in an open group, it sets the abort flag
// at once and frees at the end of the group.
#include "nccl_ends.h"

#include "device_double.h"
#include "hooks.h"
#include "nccl_calls.h"
#include "nccl_checks.h"
#include "nccl_group.h"

namespace gpudist::doubles {

namespace {

using State = Communicator::State;

int finish(const char* call, Communicator& communicator, State ended) {
  if (this_group().uses(communicator)) {
    return refuse(kNcclInvalidUsage, std::string(call) + ": a group with its operations is open");
  }
  if (ended == State::kDestroyed && communicator.has_work()) {
    return refuse(kNcclInvalidUsage, std::string(call) + ": operations are still in flight");
  }
  communicator.state = State::kFinalizing;
  communicator.drain();
  communicator.wait_for_graphs();
  if (communicator.end(ended)) return kNcclSuccess;
  return refuse(kNcclInvalidUsage, std::string(call) + ": another thread has ended it");
}

// Finalize or destroy a communicator.
int end_communicator(const char* call, NcclComm comm, State ended) {
  if (next_call_fails()) return fail_call(call);
  Communicator* communicator = find_communicator(comm);
  const bool was_finalized = communicator != nullptr && ended == State::kDestroyed &&
                             communicator->state == State::kFinalized;
  if (!was_finalized) {
    if (const int refused = check_usable(call, comm, &communicator)) return refused;
  }
  if (const int refused = enter(call, *communicator)) return refused;
  log_plain(call, communicator);
  const int result = finish(call, *communicator, ended);
  communicator->leave();
  return result;
}

}  // namespace

// Setting the abort flag, done before, needs no call of the device.
int finish_abort(Communicator& communicator) {
  need_context("abort");
  int result = kNcclSuccess;
  if (communicator.is_used_by_another()) {
    result = refuse(kNcclInvalidUsage,
                    "abort: frees " + communicator.name + " while another thread is in a call");
  }
  communicator.wait_for_graphs();
  communicator.end(State::kAborted);
  return result;
}

}  // namespace gpudist::doubles

using namespace gpudist;
using namespace gpudist::doubles;

GPUDIST_EXPORT int ncclCommFinalize(NcclComm comm) {
  return end_communicator("finalize", comm, Communicator::State::kFinalized);
}

GPUDIST_EXPORT int ncclCommDestroy(NcclComm comm) {
  return end_communicator("destroy", comm, Communicator::State::kDestroyed);
}

GPUDIST_EXPORT int ncclCommAbort(NcclComm comm) {
  Communicator* communicator = find_communicator(comm);
  if (communicator == nullptr) return refuse(kInvalidArgument, "abort: no such communicator");
  log_plain("abort", communicator);
  const bool is_grouped = this_group().depth() > 0;
  if (communicator->state == Communicator::State::kFinalizing) {
    return refuse(kNcclInvalidUsage, "abort: another thread is in its finalize");
  }
  if (!is_grouped && communicator->is_used_by_another()) {
    return refuse(kNcclInvalidUsage, "abort: another thread is in a call of " + communicator->name +
                                         ", and this is no group, which would free it later");
  }
  if (!communicator->start_abort()) {
    return refuse(kNcclInvalidUsage, "abort: the communicator has ended already");
  }
  if (!is_grouped) return finish_abort(*communicator);
  this_group().add_abort(*communicator);
  return kNcclSuccess;
}
