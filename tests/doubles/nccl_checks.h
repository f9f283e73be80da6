// Misuses that the NCCL double refuses. Result codes are NCCL's; texts describe the misuse.
#pragma once

#include <string>
#include <vector>

#include "nccl_operations.h"

namespace gpudist::doubles {

// Each function returns kNcclSuccess, or refuses.

// Check that the communicator of a call exists and has not ended.
int check_usable(const char* call, NcclComm comm, Communicator** communicator);
int check_operation(Communicator& communicator, const Operation& operation);
// Check all operations of a group on one communicator.
int check_launch(Communicator& communicator, const std::vector<Unit>& units);
int check_config(const char* call, const NcclConfig* config);

}  // namespace gpudist::doubles
