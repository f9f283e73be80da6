// The normalization kernels.
#include <cuda_runtime.h>

#include "device/norm_kernels.h"

namespace gpudist {

namespace {

// Blocks resident on a multiprocessor: half of its threads, with 64 registers each.
constexpr int kBlocksAtOnce = 4;

template <class Body>
__global__ void __launch_bounds__(NormArguments::kThreads, kBlocksAtOnce)
    norm_kernel(const __grid_constant__ NormArguments arguments) {
  __shared__ typename Body::Shared shared;
  Body::run(arguments, blockIdx.x, norming::DeviceThreads{}, shared);
}

}  // namespace

int launch_norm_kernel(const NormCall& call, void* stream) {
  const uint32_t blocks = norm_blocks(call);
  if (blocks == 0) return 0;
  const void* const kernel = norming::visit_body(
      call, [](auto body) { return reinterpret_cast<const void*>(norm_kernel<decltype(body)>); });
  void* parameters[] = {const_cast<NormArguments*>(&call.arguments)};  // only read
  return cudaLaunchKernel(kernel, blocks, NormArguments::kThreads, parameters, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace gpudist
