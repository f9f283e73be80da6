#include "nccl_calls.h"

#include "device_double.h"
#include "hooks.h"
#include "nccl_group.h"

namespace gpudist::doubles {

void log_plain(const char* call, const Communicator* communicator) {
  log_call((communicator == nullptr
                ? std::string("- -")
                : communicator->name + " " + std::to_string(communicator->rank)) +
           " " + call + " - - - - " + std::to_string(this_group().depth()));
}

int fail_call(const char* call) {
  set_last_error(std::string(call) + ": injected failure");
  this_group().fail(kSystemError);
  return kSystemError;
}

int enter(const char* call, Communicator& communicator) {
  need_context(call);
  if (communicator.enter()) return kNcclSuccess;
  return refuse(kNcclInvalidUsage,
                std::string(call) + ": another thread is using " + communicator.name);
}

}  // namespace gpudist::doubles
