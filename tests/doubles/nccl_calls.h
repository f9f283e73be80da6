// What calls of the NCCL double begin with.
#pragma once

#include "nccl_communicator.h"

namespace gpudist::doubles {

// A line of the log for a call that is no operation; `communicator` may be null.
void log_plain(const char* call, const Communicator* communicator);
// The result of a call that a test lets fail.
int fail_call(const char* call);
// Of a call that uses a communicator until it leaves it: does another thread?
int enter(const char* call, Communicator& communicator);

}  // namespace gpudist::doubles
