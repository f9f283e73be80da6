// How a rank waits: it polls for a while, then sleeps until a peer rings its doorbell.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace gpudist {

// Polling: first checks separated by pause instructions, then by yields, then sleep. Ranks that
// share cores pause only a few times, because a pause delays the ranks they wait for. Pauses and
// yields together last longer than a wakeup: otherwise two ranks that have slept once would put
// each other to sleep at every message.
constexpr int kPausesAlone = 2000;
constexpr int kPausesShared = 20;
constexpr int kYields = 500;
constexpr long kSleepNs = 20'000'000;

// Return whether every rank has a core. A process bound to one core is assumed to own it.
inline bool has_cores_for(int ranks) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) != 0) return false;
  const int mine = CPU_COUNT(&cores);
  return ranks <= (mine > 1 ? mine : sysconf(_SC_NPROCESSORS_ONLN));
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
