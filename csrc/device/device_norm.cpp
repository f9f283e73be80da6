#include "device/device_norm.h"

#include "device/device.h"

namespace gpudist {

namespace {

uint32_t multiprocessors_of(const DeviceApi& api, int device) {
  int number = 0;
  check_device(api, api.multiprocessors(device, &number), "counting multiprocessors");
  return static_cast<uint32_t>(number);
}

}  // namespace

DeviceNorm::DeviceNorm(const DeviceApi& api, int device, const NormShape& shape)
    : api_(api), device_(device), plan_(shape, multiprocessors_of(api, device)) {}

void DeviceNorm::launch(const NormCall& call, DeviceStream stream) const {
  check_device(api_, api_.launch_norm(call, stream), "launching a normalization");
}

void DeviceNorm::sums(const NormTensors& tensors, DeviceStream stream) const {
  const DeviceGuard guard(api_, device_);
  const NormCall sums = plan_.sums(tensors);
  launch(sums, stream);
  launch(plan_.finish_sums(sums), stream);
}

void DeviceNorm::normalize(const NormTensors& tensors, const NormRunning& running,
                           DeviceStream stream) const {
  const DeviceGuard guard(api_, device_);
  launch(plan_.normalize(tensors, running), stream);
}

void DeviceNorm::gradient_sums(const NormTensors& tensors, DeviceStream stream) const {
  const DeviceGuard guard(api_, device_);
  const NormCall sums = plan_.gradient_sums(tensors);
  launch(sums, stream);
  launch(plan_.finish_gradient_sums(sums), stream);
}

void DeviceNorm::gradient(const NormTensors& tensors, DeviceStream stream) const {
  const DeviceGuard guard(api_, device_);
  launch(plan_.gradient(tensors), stream);
}

}  // namespace gpudist
