// What the NCCL double refuses. Its results are NCCL's, its texts name the misuse.
#pragma once

#include <string>
#include <vector>

#include "nccl_operations.h"

namespace gpudist::doubles {

// Each returns kNcclSuccess, or refuses.

// Of a call of a communicator: is there one, and not at its end?
int check_usable(const char* call, NcclComm comm, Communicator** communicator);
int check_operation(Communicator& communicator, const Operation& operation);
// Of all operations that a group has for a communicator.
int check_launch(Communicator& communicator, const std::vector<Unit>& units);
int check_config(const char* call, const NcclConfig* config);

}  // namespace gpudist::doubles
