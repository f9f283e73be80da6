// Faults that strike a chosen rank: in the middle of a message of the double, or at the first
// access to a guarded page.
#include "strike.h"

#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "hooks.h"

namespace gpudist::doubles {

namespace {

struct Blow {
  int signal;  // 0: only a delay
  int delay_us;
  int report;  // descriptor to write the time to, in seconds as a double; -1: none
};

Blow blow{SIGKILL, 0, -1};
std::atomic<bool> is_armed{false};
char* guarded = nullptr;
size_t guarded_bytes = 0;

void tell_when() {
  if (blow.report < 0) return;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  const double now_s = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  if (write(blow.report, &now_s, sizeof(now_s)) < 0) return;
}

void on_touch(int, siginfo_t* info, void*) {
  char* const at = static_cast<char*>(info->si_addr);
  const bool is_ours = guarded != nullptr && at >= guarded && at < guarded + guarded_bytes;
  if (!is_ours || blow.signal == SIGSEGV) {
    if (is_ours) tell_when();
    signal(SIGSEGV, SIG_DFL);  // the next fault ends the process
    return;
  }
  strike();
  mprotect(guarded, guarded_bytes, PROT_READ | PROT_WRITE);
}

}  // namespace

bool strike() {
  if (!is_armed.exchange(false)) return false;
  tell_when();
  if (blow.delay_us > 0) usleep(blow.delay_us);
  if (blow.signal == 0) return true;
  kill(getpid(), blow.signal);
  // The signal may stop another thread first; wait until this one stops too.
  if (blow.signal == SIGSTOP) usleep(100'000);
  return true;
}

}  // namespace gpudist::doubles

using namespace gpudist::doubles;

// Set what the next strike does; it happens once.
GPUDIST_EXPORT void gpudist_double_arm(int signal_number, int delay_us, int report) {
  blow = {signal_number, delay_us, report};
  is_armed = true;
}

// Strike at the first access to these pages of this process, and make them accessible again.
GPUDIST_EXPORT int gpudist_double_guard(void* pages, size_t bytes) {
  guarded = static_cast<char*>(pages);
  guarded_bytes = bytes;
  struct sigaction action{};
  action.sa_sigaction = on_touch;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (sigaction(SIGSEGV, &action, nullptr) != 0) return -1;
  return mprotect(pages, bytes, PROT_NONE);
}
