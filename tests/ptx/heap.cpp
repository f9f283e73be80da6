// Preloaded before all other libraries. Records the range of every block from malloc() and related
// functions, so that accesses outside tensors, or after they are freed, are detected.
#include "heap.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <map>
#include <mutex>

#define GPUDIST_EXPORT extern "C" __attribute__((visibility("default")))

extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* memory);
}

namespace {

struct Blocks {
  std::mutex mutex;
  std::map<uint64_t, uint64_t> ends;  // by start
};

// Memory allocated by the recording itself is not recorded.
thread_local bool is_noting = false;

struct Noting {
  Noting() { is_noting = true; }
  ~Noting() { is_noting = false; }
};

Blocks& blocks();
void lock() {
  blocks().mutex.lock();
}
void unlock() {
  blocks().mutex.unlock();
}

Blocks& blocks() {
  static Blocks& blocks = *new Blocks;
  // Another thread may hold the lock during fork().
  static const int registered = pthread_atfork(lock, unlock, unlock);
  static_cast<void>(registered);
  return blocks;
}

void* noted(void* memory, size_t bytes) {
  if (memory == nullptr || bytes == 0 || is_noting) return memory;
  const Noting noting;
  const auto begin = reinterpret_cast<uint64_t>(memory);
  Blocks& all = blocks();
  const std::lock_guard<std::mutex> locked(all.mutex);
  all.ends[begin] = begin + bytes;
  return memory;
}

void forget(void* memory) {
  if (memory == nullptr || is_noting) return;
  const Noting noting;
  Blocks& all = blocks();
  const std::lock_guard<std::mutex> locked(all.mutex);
  all.ends.erase(reinterpret_cast<uint64_t>(memory));
}

// A mapping may be unmapped in part.
void cut(void* memory, size_t bytes) {
  if (is_noting) return;
  const Noting noting;
  const auto begin = reinterpret_cast<uint64_t>(memory);
  const uint64_t end = begin + bytes;
  Blocks& all = blocks();
  const std::lock_guard<std::mutex> locked(all.mutex);
  auto found = all.ends.upper_bound(begin);
  if (found == all.ends.begin()) return;
  --found;
  if (found->second <= begin) return;
  const uint64_t last = found->second;
  if (found->first == begin) {
    all.ends.erase(found);
  } else {
    found->second = begin;
  }
  if (end < last) all.ends[end] = last;
}

}  // namespace

GPUDIST_EXPORT void gpudist_heap_find(uint64_t address, uint64_t* begin, uint64_t* end) {
  *begin = *end = 0;
  const Noting noting;
  Blocks& all = blocks();
  const std::lock_guard<std::mutex> locked(all.mutex);
  auto found = all.ends.upper_bound(address);
  if (found == all.ends.begin()) return;
  --found;
  *begin = found->first;
  *end = found->second;
}

GPUDIST_EXPORT void* malloc(size_t bytes) noexcept {
  return noted(__libc_malloc(bytes), bytes);
}
GPUDIST_EXPORT void* calloc(size_t count, size_t bytes) noexcept {
  return noted(__libc_calloc(count, bytes), count * bytes);
}
GPUDIST_EXPORT void* realloc(void* memory, size_t bytes) noexcept {
  forget(memory);
  return noted(__libc_realloc(memory, bytes), bytes);
}
GPUDIST_EXPORT void* memalign(size_t alignment, size_t bytes) noexcept {
  return noted(__libc_memalign(alignment, bytes), bytes);
}
GPUDIST_EXPORT void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  return noted(__libc_memalign(alignment, bytes), bytes);
}
GPUDIST_EXPORT int posix_memalign(void** made, size_t alignment, size_t bytes) noexcept {
  void* const memory = __libc_memalign(alignment, bytes);
  if (memory == nullptr) return ENOMEM;
  *made = noted(memory, bytes);
  return 0;
}
GPUDIST_EXPORT void free(void* memory) noexcept {
  forget(memory);
  __libc_free(memory);
}

GPUDIST_EXPORT void* mmap(void* at, size_t bytes, int protection, int flags, int file,
                          off_t offset) noexcept {
  const long made = syscall(SYS_mmap, at, bytes, protection, flags, file, offset);
  if (made == -1) return MAP_FAILED;
  return noted(reinterpret_cast<void*>(made), bytes);
}
GPUDIST_EXPORT int munmap(void* memory, size_t bytes) noexcept {
  cut(memory, bytes);
  return static_cast<int>(syscall(SYS_munmap, memory, bytes));
}
