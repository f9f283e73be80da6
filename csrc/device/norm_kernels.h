// Launches of the normalization kernels.
#pragma once

#include "core/norm_kernels.h"

namespace gpudist {

// Both return zero or an error code of the runtime.
int launch_norm_kernel(const NormCall& call, void* stream);
// Load all kernels, see DeviceApi::check_kernels.
int load_norm_kernels();

}  // namespace gpudist
