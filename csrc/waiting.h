// How a rank waits: it looks a while, then sleeps until a peer rings its doorbell.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace gpudist {

// Looks before a waiting rank sleeps. Where each rank has a core, for longer than it takes to wake
// up: else two ranks, once one has slept, send each other to sleep at every message. Where ranks
// share cores, every look but the first ones lets another rank run.
constexpr int kSpinsAlone = 20000;
constexpr int kSpinsShared = 500;
constexpr int kSpinsBeforeYield = 20;
constexpr long kSleepNs = 20'000'000;

inline bool has_cores_for(int ranks) {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 && ranks <= CPU_COUNT(&cores);
}

inline double now_s() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline void futex_wait(std::atomic<uint32_t>* word, uint32_t seen) {
  const timespec limit{0, kSleepNs};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace gpudist
