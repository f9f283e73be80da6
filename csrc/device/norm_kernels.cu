// The normalization kernels.
#include "device/kernel_list.h"

namespace gpudist {

// Blocks resident on a multiprocessor: half of its threads, with 64 registers each.
constexpr int kBlocksAtOnce = 4;

template <class Body>
__device__ __forceinline__ void run(const NormArguments& arguments) {
  __shared__ typename Body::Shared shared;
  Body::run(arguments, blockIdx.x, norming::DeviceThreads{}, shared);
}

#define GPUDIST_NORM_KERNEL(name, ...)                                                 \
  extern "C" __global__ void __launch_bounds__(NormArguments::kThreads, kBlocksAtOnce) \
      name(const __grid_constant__ NormArguments arguments) {                          \
    run<__VA_ARGS__>(arguments);                                                       \
  }
GPUDIST_NORM_KERNELS(GPUDIST_NORM_KERNEL)

}  // namespace gpudist
