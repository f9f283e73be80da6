// The combine kernels. The one with the largest parameter can be compiled alone, because a driver
// that does not allow such parameters may refuse all kernels compiled with it.
#include "device/kernel_list.h"

namespace gpudist {

// Blocks resident on a multiprocessor: half of its threads, with 64 registers each.
constexpr int kBlocksAtOnce = 4;

#define GPUDIST_INLINED_KERNEL(name, kBytes)                                              \
  extern "C" __global__ void __launch_bounds__(CombineArguments::kThreads, kBlocksAtOnce) \
      name(const __grid_constant__ Inlined<kBytes> inlined) {                             \
    combine(inlined.arguments, reinterpret_cast<const CombineJob*>(inlined.tables),       \
            reinterpret_cast<const CombineView*>(inlined.tables + inlined.views_offset),  \
            blockIdx.x, threadIdx.x);                                                     \
  }

#ifndef GPUDIST_LARGE_PARAMETER_ONLY
// Kernel with tables in device memory.
extern "C" __global__ void __launch_bounds__(CombineArguments::kThreads, kBlocksAtOnce)
    combine_kernel(const __grid_constant__ CombineArguments arguments) {
  combine(arguments, arguments.jobs, arguments.views, blockIdx.x, threadIdx.x);
}
GPUDIST_COMBINE_KERNELS(GPUDIST_INLINED_KERNEL)
#endif
#ifndef GPUDIST_SMALL_PARAMETERS_ONLY
GPUDIST_INLINED_KERNEL(combine_kernel_of_many, kMany)
#endif

}  // namespace gpudist
