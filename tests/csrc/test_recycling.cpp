// The recycling pool: reuse, return of memory to the system, threads and fork().
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "core/recycling.h"
#include "test.h"

namespace {

using gpudist::recycling_pool;
using gpudist::RecyclingPool;

constexpr size_t kMiB = size_t{1} << 20;

bool is_mapped(char* data) {
  unsigned char resident;
  return mincore(data, 1, &resident) == 0 || errno != ENOMEM;
}

void classes() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  std::mt19937_64 random(1);
  long wrong = 0;
  size_t classes_of_an_octave = 0, last = 0;
  for (size_t bytes = 64 * page; bytes < 128 * page; bytes += 8) {
    const size_t whole = RecyclingPool::class_bytes(bytes + 1);
    classes_of_an_octave += whole != last;
    last = whole;
  }
  for (int i = 0; i < 100'000; ++i) {
    const size_t bytes = (8 * page) + (random() >> (8 + random() % 44));
    const size_t whole = RecyclingPool::class_bytes(bytes);
    wrong += whole < bytes || whole - bytes > bytes / 8 || whole % page != 0;
    wrong += RecyclingPool::class_bytes(whole) != whole;
    wrong += RecyclingPool::class_bytes(bytes + 1) < whole;
  }
  CHECK(wrong == 0);
  CHECK(classes_of_an_octave == 8);
  CHECK(RecyclingPool::class_bytes(0) == page);
}

// Only small pages exist at once, where the system can make them.
void new_blocks() {
  RecyclingPool pool(64 * kMiB);
  const auto first = pool.acquire(3 * kMiB), second = pool.acquire(kMiB);
  char* const data = first->data;
  CHECK(pool.is_new(data) && pool.is_new(second->data));
  CHECK(!pool.is_new(data + 1) && !pool.is_new(nullptr));
  unsigned char resident = 1;
  CHECK(mincore(data, 1, &resident) == 0 && (resident & 1) == 0);
  if (madvise(second->data, kMiB, 23) == 0) {
    CHECK(mincore(data + 2 * kMiB, 1, &resident) == 0);
    CHECK((resident & 1) == 1);
  }
  pool.release(first);
  CHECK(!pool.is_new(data));
  const auto again = pool.acquire(3 * kMiB);
  CHECK(again->data == data && !pool.is_new(data));
  CHECK(pool.is_new(second->data));
  pool.release(again);
  pool.release(second);
}

void reuse() {
  RecyclingPool pool(64 * kMiB);
  const auto first = pool.acquire(3 * kMiB);
  char* const data = first->data;
  CHECK(first->bytes == 3 * kMiB);
  CHECK(reinterpret_cast<uintptr_t>(data) % (2 * kMiB) == 0);
  data[0] = data[3 * kMiB - 1] = 7;
  const auto second = pool.acquire(3 * kMiB);
  CHECK(second->data >= data + 3 * kMiB || second->data + 3 * kMiB <= data);
  pool.release(first);
  CHECK(pool.statistics().idle_bytes == 3 * kMiB);
  CHECK(pool.statistics().in_use_bytes == 3 * kMiB);
  const auto other_class = pool.acquire(2 * kMiB);
  CHECK(other_class->data != data);
  const auto again = pool.acquire(3 * kMiB - 1000);
  CHECK(again->data == data);
  CHECK(data[0] == 7 && data[3 * kMiB - 1] == 7);
  const RecyclingPool::Statistics now = pool.statistics();
  CHECK(now.in_use_bytes == 8 * kMiB && now.idle_bytes == 0);
  CHECK(now.hits == 1 && now.misses == 3 && now.limit_bytes == 64 * kMiB);
}

void limit() {
  RecyclingPool pool(6 * kMiB);
  const auto large = pool.acquire(4 * kMiB), middle = pool.acquire(2 * kMiB),
             small = pool.acquire(kMiB), huge = pool.acquire(7 * kMiB);
  char *const large_data = large->data, *const middle_data = middle->data,
              *const small_data = small->data, *const huge_data = huge->data;
  pool.release(middle);
  pool.release(large);
  CHECK(pool.statistics().idle_bytes == 6 * kMiB);
  pool.release(huge);
  CHECK(!is_mapped(huge_data));
  CHECK(pool.statistics().idle_bytes == 6 * kMiB);
  pool.release(pool.acquire(2 * kMiB));  // now the large block is the least recently used
  pool.release(small);
  CHECK(pool.statistics().idle_bytes == 3 * kMiB);
  CHECK(!is_mapped(large_data) && is_mapped(middle_data) && is_mapped(small_data));
  pool.set_limit(2 * kMiB);
  CHECK(!is_mapped(middle_data) && is_mapped(small_data));
  pool.empty();
  CHECK(!is_mapped(small_data));
  pool.set_limit(0);
  const auto block = pool.acquire(kMiB);
  char* const data = block->data;
  pool.release(block);
  CHECK(!is_mapped(data));
  CHECK(pool.statistics().idle_bytes == 0 && pool.statistics().in_use_bytes == 0);
}

void no_memory() {
  RecyclingPool pool(64 * kMiB);
  const auto block = pool.acquire(kMiB);
  pool.release(block);
  int refused = 0;
  for (const size_t bytes : {size_t{1} << 50, std::numeric_limits<size_t>::max()}) {
    try {
      pool.acquire(bytes);
    } catch (const std::bad_alloc&) {
      ++refused;
    }
  }
  CHECK(refused == 2);
  CHECK(pool.statistics().in_use_bytes == 0);
  // acquire() returned the idle block, although that did not help
  CHECK(pool.statistics().idle_bytes == 0);
}

// Threads acquire, fill, check and release blocks; half of the blocks come from another thread.
class Hammer {
 public:
  void run(int thread, int rounds) {
    std::mt19937 random(static_cast<unsigned>(thread));
    for (int round = 0; round < rounds; ++round) {
      const size_t bytes = 4096 + random() % (64 * 1024);
      const auto block = pool.acquire(bytes);
      const char mark = static_cast<char>(random());
      block->data[0] = block->data[bytes / 2] = block->data[bytes - 1] = mark;
      Filled filled{block, bytes, mark};
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::swap(filled, shelf_[random() % shelf_.size()]);
      }
      if (filled.bytes > 0) drop(filled);
      if (random() % 64 == 0) pool.empty();
      if (random() % 64 == 0) pool.set_limit(random() % (256 * 1024));
    }
  }

  void finish() {
    for (const Filled& filled : shelf_) {
      if (filled.bytes > 0) drop(filled);
    }
    CHECK(spoiled.load() == 0);
    CHECK(pool.statistics().in_use_bytes == 0);
  }

  RecyclingPool pool{256 * 1024};
  std::atomic<long> spoiled{0};

 private:
  struct Filled {
    RecyclingPool::Handle block;
    size_t bytes = 0;
    char mark = 0;
  };

  void drop(const Filled& filled) {
    const char* data = filled.block->data;
    for (const size_t place : {size_t{0}, filled.bytes / 2, filled.bytes - 1}) {
      spoiled += data[place] != filled.mark;
    }
    pool.release(filled.block);
  }

  std::mutex mutex_;
  std::array<Filled, 16> shelf_;
};

void threads() {
  Hammer hammer;
  std::vector<std::thread> running;
  for (int thread = 0; thread < 4; ++thread) {
    running.emplace_back([&hammer, thread] { hammer.run(thread, 5000); });
  }
  for (std::thread& thread : running) thread.join();
  hammer.finish();
}

// Run `body` in a child process, whose exit status it returns.
template <class F>
int exit_status_of_child(F body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // terminates a child that hangs
    _exit(body());
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}

void fork_keeps_blocks_apart() {
  RecyclingPool& pool = recycling_pool();
  const auto mine = pool.acquire(kMiB), idle = pool.acquire(kMiB);
  char* const idle_data = idle->data;
  mine->data[0] = idle->data[0] = 1;
  pool.release(idle);
  const int status = exit_status_of_child([&] {
    if (pool.statistics().idle_bytes != 0 || is_mapped(idle_data)) return 1;
    if (mine->data[0] != 1) return 2;
    mine->data[0] = 2;
    pool.release(mine);
    if (pool.acquire(kMiB)->data != mine->data) return 3;
    return 0;
  });
  CHECK(status == 0);
  CHECK(mine->data[0] == 1 && idle_data[0] == 1);
  CHECK(pool.statistics().idle_bytes == kMiB);
  pool.release(mine);
  pool.empty();
}

void fork_while_threads_use_it() {
  RecyclingPool& pool = recycling_pool();
  std::atomic<bool> stop{false};
  std::vector<std::thread> running;
  for (int thread = 0; thread < 2; ++thread) {
    running.emplace_back([&] {
      while (!stop) pool.release(pool.acquire(kMiB));
    });
  }
  long failures = 0;
  for (int i = 0; i < 50; ++i) {
    failures += exit_status_of_child([&] {
                  const auto block = pool.acquire(kMiB);
                  block->data[0] = 1;
                  pool.release(block);
                  return 0;
                }) != 0;
  }
  stop = true;
  for (std::thread& thread : running) thread.join();
  CHECK(failures == 0);
  CHECK(pool.statistics().in_use_bytes == 0);
  pool.empty();
}

}  // namespace

void test_recycling() {
  classes();
  new_blocks();
  reuse();
  limit();
  no_memory();
  threads();
  fork_keeps_blocks_apart();
  fork_while_threads_use_it();
}
