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

// Looks before a waiting rank sleeps: few where ranks share cores, since it holds up whom it waits
// for; enough to bridge a peer's Python where each has a core, since waking up costs more than
// that.
constexpr int kSpinsShared = 200;
constexpr int kSpinsAlone = 2000;
constexpr long kSleepNs = 20'000'000;

inline int spins_for(int ranks) {
  cpu_set_t cores;
  const bool known = sched_getaffinity(0, sizeof(cores), &cores) == 0;
  return known && ranks <= CPU_COUNT(&cores) ? kSpinsAlone : kSpinsShared;
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
