// The normalization kernels.
#include <cuda_runtime.h>

#include "core/norm_body.h"
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

const void* kernel_of(const NormCall& call) {
  return norming::visit_body(
      call, [](auto body) { return reinterpret_cast<const void*>(norm_kernel<decltype(body)>); });
}

}  // namespace

int load_norm_kernels() {
  NormCall call{};
  for (const NormPass pass :
       {NormPass::kSums, NormPass::kFinishSums, NormPass::kNormalize, NormPass::kGradientSums,
        NormPass::kFinishGradientSums, NormPass::kGradient}) {
    for (const NormWalk walk : {NormWalk::kRows, NormWalk::kColumns, NormWalk::kCells}) {
      for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
        for (const bool is_wide : {false, true}) {
          call.pass = pass, call.walk = walk, call.is_wide = is_wide, call.arguments.dtype = dtype;
          cudaFuncAttributes attributes;
          const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel_of(call));
          if (error != cudaSuccess) return static_cast<int>(error);
        }
      }
    }
  }
  return 0;
}

int launch_norm_kernel(const NormCall& call, void* stream) {
  const uint32_t blocks = norm_blocks(call);
  if (blocks == 0) return 0;
  const void* const kernel = kernel_of(call);
  void* parameters[] = {const_cast<NormArguments*>(&call.arguments)};  // only read
  return cudaLaunchKernel(kernel, blocks, NormArguments::kThreads, parameters, 0,
                          static_cast<cudaStream_t>(stream));
}

}  // namespace gpudist
