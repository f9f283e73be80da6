// Launches of the normalization kernels.
#pragma once

#include "core/norm_kernels.h"

namespace gpudist {

// Returns zero or an error code of the runtime.
int launch_norm_kernel(const NormCall& call, void* stream);

}  // namespace gpudist
