// Phases of the threads of a block, and sums over threads.
#pragma once

#include <vector>

#include "core/norm_kernels.h"

namespace gpudist {
namespace norming {

constexpr uint32_t kThreads = NormArguments::kThreads;

// A phase is a function of the thread's number; all threads end it before any begins the next.
// `Each<State>` holds the registers of each thread.
struct DeviceThreads {
  template <class State>
  struct Each {
    State state;
    GPUDIST_HOST_DEVICE State& operator[](uint32_t) { return state; }
  };
  template <class Phase>
  GPUDIST_HOST_DEVICE void operator()(const Phase& phase) const {
    last(phase);
#ifdef __CUDA_ARCH__
    __syncthreads();
#endif
  }
  template <class Phase>
  GPUDIST_HOST_DEVICE void last([[maybe_unused]] const Phase& phase) const {
#ifdef __CUDA_ARCH__
    phase(threadIdx.x);
#endif
  }
};

#ifndef __CUDACC__
struct HostThreads {
  template <class State>
  struct Each {
    std::vector<State> states = std::vector<State>(kThreads);
    State& operator[](uint32_t thread) { return states[thread]; }
  };
  template <class Phase>
  void operator()(const Phase& phase) const {
    for (uint32_t thread = 0; thread < kThreads; ++thread) phase(thread);
  }
  template <class Phase>
  void last(const Phase& phase) const {
    (*this)(phase);
  }
};
#endif

template <int kValues>
struct Reduction {
  double values[kValues][kThreads];
};

// Sum over every `kRadix` of the `left` members.
template <uint32_t kRadix, class Threads, int kValues>
GPUDIST_HOST_DEVICE inline void reduce_once(const Threads& threads, Reduction<kValues>& shared,
                                            uint32_t members, uint32_t stride, uint32_t left) {
  const uint32_t next = left / kRadix;
  threads([&](uint32_t thread) {
    if ((thread / stride & (members - 1)) >= next) return;
    for (int v = 0; v < kValues; ++v) {
      double sum = shared.values[v][thread];
      for (uint32_t r = 1; r < kRadix; ++r) sum += shared.values[v][thread + r * next * stride];
      shared.values[v][thread] = sum;
    }
  });
}

// Sum over the members of each group of threads; thread `t` is member `t / stride % members`. The
// sums are those of member 0. Other threads read them after a barrier.
template <class Threads, int kValues>
GPUDIST_HOST_DEVICE inline void reduce(const Threads& threads, Reduction<kValues>& shared,
                                       uint32_t members, uint32_t stride) {
  uint32_t left = members;
  for (; left >= 4; left /= 4) reduce_once<4>(threads, shared, members, stride, left);
  if (left == 2) reduce_once<2>(threads, shared, members, stride, left);
}

}  // namespace norming
}  // namespace gpudist
