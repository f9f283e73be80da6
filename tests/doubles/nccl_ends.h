// Ending communicators of the NCCL double.
#pragma once

#include "nccl_communicator.h"

namespace gpudist::doubles {

// Free a communicator whose abort has begun, once no graph contains works of it.
int finish_abort(Communicator& communicator);

}  // namespace gpudist::doubles
