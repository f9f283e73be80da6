// Kernels that draw the random numbers of cells; a kernel for each kind of draw and of cells.
#include <cuda_runtime.h>

#include "core/random_body.h"
#include "device/random_launch.h"

namespace gpudist {

namespace {

// Blocks resident on a multiprocessor: three quarters of its threads, with 40 registers each.
constexpr int kBlocksAtOnce = 6;
// The arithmetic in float64 needs more registers.
constexpr int kNormalBlocksAtOnce = 5;

template <Draw kDraw, class Cells>
__global__ void __launch_bounds__(RandomArguments::kThreads,
                                  kDraw == Draw::kNormal ? kNormalBlocksAtOnce : kBlocksAtOnce)
    random_kernel(const __grid_constant__ RandomArguments arguments) {
  randomly::draw_cells<kDraw, Cells>(arguments, blockIdx.x, threadIdx.x);
}

}  // namespace

int launch_random(const RandomArguments& arguments, DeviceStream stream) {
  return randomly::with_types(arguments.draw, arguments.dtype, [&](auto draw, auto cells) {
    const auto kernel = random_kernel<decltype(draw)::value, decltype(cells)>;
    void* parameters[] = {const_cast<RandomArguments*>(&arguments)};  // only read
    const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                               arguments.blocks, RandomArguments::kThreads,
                                               parameters, 0, static_cast<cudaStream_t>(stream));
    // Clear the error: the runtime would report it again to the next caller of cudaGetLastError.
    if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
    return static_cast<int>(error);
  });
}

int load_random_kernels() {
  for (const Draw draw :
       {Draw::kKept, Draw::kUniform, Draw::kNormal, Draw::kBernoulli, Draw::kScaled}) {
    for (const Dtype dtype :
         {Dtype::kFloat16, Dtype::kBfloat16, Dtype::kFloat32, Dtype::kFloat64}) {
      const cudaError_t error = randomly::with_types(draw, dtype, [](auto kind, auto cells) {
        const auto kernel = random_kernel<decltype(kind)::value, decltype(cells)>;
        cudaFuncAttributes attributes;
        return cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel));
      });
      if (error != cudaSuccess) return static_cast<int>(error);
    }
  }
  return 0;
}

}  // namespace gpudist
