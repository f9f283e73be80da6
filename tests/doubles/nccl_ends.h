// How communicators of the NCCL double end.
#pragma once

#include "nccl_communicator.h"

namespace gpudist::doubles {

// Free a communicator whose abort has begun: when no graph has works of it any more.
int finish_abort(Communicator& communicator);

}  // namespace gpudist::doubles
