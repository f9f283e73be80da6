// Checks and logging at the start of the NCCL double's calls.
#pragma once

#include "nccl_communicator.h"

namespace gpudist::doubles {

// Log a call that is not an operation. `communicator` may be null.
void log_plain(const char* call, const Communicator* communicator);
// Result of a call that a test makes fail.
int fail_call(const char* call);
// Start a call that uses the communicator until leave(). Refuses if another thread is using it.
int enter(const char* call, Communicator& communicator);

}  // namespace gpudist::doubles
