// Replaces cuda_api.cu in builds without CUDA.
#include "device/device_api.h"

namespace gpudist {

const DeviceApi* cuda_api() {
  return nullptr;
}

}  // namespace gpudist
