// The word by which kernels learn that the world has failed, so that what they read was not moved.
#pragma once

#include <cstdint>

#include "core/box.h"

namespace gpudist {

// If the word is in host memory, the load takes about a microsecond once per multiprocessor, whose
// cache is empty when a kernel starts, so that earlier writes are visible. On an H200, a load past
// the caches in each block made a halo of 256^3 cells 13 times as long, and one of 16^3 by 6 us.
GPUDIST_HOST_DEVICE inline bool is_set(const uint32_t* word) {
  if (word == nullptr) return false;
#ifdef __CUDA_ARCH__
  return *word != 0;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED) != 0;
#endif
}

}  // namespace gpudist
