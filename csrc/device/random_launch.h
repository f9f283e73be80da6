// Launches of the kernels in random_cells.cu.
#pragma once

#include "core/random_cells.h"
#include "device/device_api.h"

namespace gpudist {

int launch_random(const RandomArguments& arguments, DeviceStream stream);
// Load all of them, see DeviceApi::check_kernels.
int load_random_kernels();

}  // namespace gpudist
