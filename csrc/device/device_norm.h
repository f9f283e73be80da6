// Normalization of blocks of one shape on a GPU.
#pragma once

#include "core/norm_plan.h"
#include "device/device_api.h"

namespace gpudist {

// The caller adds sums up over workers between the calls. All work is put on a stream of the
// device.
class DeviceNorm {
 public:
  DeviceNorm(const DeviceApi& api, int device, const NormShape& shape);

  int64_t workspace() const { return plan_.workspace(); }
  void sums(const NormTensors& tensors, DeviceStream stream) const;
  void normalize(const NormTensors& tensors, const NormRunning& running, DeviceStream stream) const;
  void gradient_sums(const NormTensors& tensors, DeviceStream stream) const;
  void gradient(const NormTensors& tensors, DeviceStream stream) const;

 private:
  void launch(const NormCall& call, DeviceStream stream) const;

  const DeviceApi& api_;
  int device_;
  NormPlan plan_;
};

}  // namespace gpudist
