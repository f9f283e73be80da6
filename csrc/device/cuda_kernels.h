// The kernels on the GPU of the calling thread's context. Every call returns zero or an error code
// of the driver.
#pragma once

#include <vector>

#include "device/device_api.h"

namespace gpudist {

struct KernelName {
  const char* unit;
  const char* name;
};
std::vector<KernelName> kernel_names();

// Load all kernels; a launch loads them otherwise. Loading may wait for kernels in progress.
int load_kernels();

uint32_t most_inline_bytes();
int launch_combine(const CombineArguments& arguments, DeviceStream stream);
int launch_random(const RandomArguments& arguments, DeviceStream stream);
int launch_norm(const NormCall& call, DeviceStream stream);

}  // namespace gpudist
