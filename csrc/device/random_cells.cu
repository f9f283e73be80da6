// Kernels that draw the random numbers of cells; a kernel for each kind of draw and of cells.
#include "device/kernel_list.h"

namespace gpudist {

// Blocks resident on a multiprocessor: three quarters of its threads, with 40 registers each.
constexpr int kBlocksAtOnce = 6;
// The arithmetic in float64 needs more registers.
constexpr int kNormalBlocksAtOnce = 5;

#define GPUDIST_RANDOM_KERNEL(name, kDraw, Cells)                                              \
  extern "C" __global__ void __launch_bounds__(                                                \
      RandomArguments::kThreads, kDraw == Draw::kNormal ? kNormalBlocksAtOnce : kBlocksAtOnce) \
      name(const __grid_constant__ RandomArguments arguments) {                                \
    randomly::draw_cells<kDraw, Cells>(arguments, blockIdx.x, threadIdx.x);                    \
  }
GPUDIST_RANDOM_KERNELS(GPUDIST_RANDOM_KERNEL)

}  // namespace gpudist
