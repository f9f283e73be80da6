#include "core/recycling.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <new>

namespace gpudist {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// MADV_POPULATE_WRITE, since Linux 5.14.
constexpr int kPopulateWrite = 23;
constexpr size_t kLargest = size_t{1} << 56;
constexpr uint64_t kMostByDefault = uint64_t{1} << 30;

size_t page_bytes() {
  static const size_t bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Returns null if there is no memory.
char* map_pages(size_t bytes) {
  const size_t spare = bytes >= kHugePage ? kHugePage - page_bytes() : 0;
  void* memory =
      mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  char* data = static_cast<char*>(memory);
  const size_t before = spare > 0 ? -reinterpret_cast<uintptr_t>(data) % kHugePage : 0;
  if (before > 0) munmap(data, before);
  data += before;
  if (before < spare) munmap(data + bytes, spare - before);
  // Huge pages are made when they are written, while they are in the cache. Small ones are made at
  // once, since a fault costs more than to fill its page. Where a system does not know this, advice
  // fails, and pages are made one by one.
  const size_t huge = bytes / kHugePage * kHugePage;
  if (huge > 0) madvise(data, bytes, MADV_HUGEPAGE);
  if (huge < bytes) madvise(data + huge, bytes - huge, kPopulateWrite);
  return data;
}

void unmap(const RecyclingPool::Blocks& blocks) {
  for (const RecyclingPool::Block& block : blocks) munmap(block.data, block.bytes);
}

// One GiB, or a quarter of the memory available to this process if that is less.
size_t default_limit_bytes() {
  uint64_t memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes();
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    uint64_t bytes;
    if (file >> bytes) memory = std::min(memory, bytes);
  }
  return static_cast<size_t>(std::min(kMostByDefault, memory / 4));
}

}  // namespace

RecyclingPool::~RecyclingPool() {
  unmap(in_use_);
  for (const auto& [bytes, blocks] : idle_) unmap(blocks);
}

size_t RecyclingPool::class_bytes(size_t bytes) {
  size_t step = page_bytes();
  while (step <= bytes / 16) step *= 2;
  return std::max((bytes + step - 1) / step, size_t{1}) * step;
}

RecyclingPool::Handle RecyclingPool::acquire(size_t bytes) {
  if (bytes > kLargest) throw std::bad_alloc();
  const size_t whole = class_bytes(bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Blocks& idle = idle_[whole];
    if (!idle.empty()) {
      const Handle block = std::prev(idle.end());
      in_use_.splice(in_use_.end(), idle, block);
      idle_bytes_ -= whole;
      in_use_bytes_ += whole;
      ++hits_;
      return block;
    }
    ++misses_;
  }
  Blocks made(1, Block{map_pages(whole), whole, 0});
  if (made.front().data == nullptr) {
    empty();
    made.front().data = map_pages(whole);
  }
  if (made.front().data == nullptr) throw std::bad_alloc();
  const std::lock_guard<std::mutex> lock(mutex_);
  in_use_.splice(in_use_.end(), made);
  in_use_bytes_ += whole;
  return std::prev(in_use_.end());
}

void RecyclingPool::release(Handle block) noexcept {
  Blocks surplus;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    in_use_bytes_ -= block->bytes;
    block->released = ++releases_;
    if (block->bytes > limit_bytes_) {
      // A block above the limit would evict all others: return it to the system.
      surplus.splice(surplus.end(), in_use_, block);
    } else {
      Blocks& idle = idle_.find(block->bytes)->second;
      idle.splice(idle.end(), in_use_, block);
      idle_bytes_ += block->bytes;
      shed(limit_bytes_, surplus);
    }
  }
  unmap(surplus);
}

void RecyclingPool::empty() noexcept {
  Blocks surplus;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    shed(0, surplus);
  }
  unmap(surplus);
}

void RecyclingPool::set_limit(size_t bytes) noexcept {
  Blocks surplus;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    limit_bytes_ = bytes;
    shed(limit_bytes_, surplus);
  }
  unmap(surplus);
}

void RecyclingPool::shed(size_t limit_bytes, Blocks& surplus) noexcept {
  while (idle_bytes_ > limit_bytes) {
    Blocks* oldest = nullptr;
    for (auto& [bytes, blocks] : idle_) {
      if (blocks.empty()) continue;
      if (oldest == nullptr || blocks.front().released < oldest->front().released) {
        oldest = &blocks;
      }
    }
    idle_bytes_ -= oldest->front().bytes;
    surplus.splice(surplus.end(), *oldest, oldest->begin());
  }
}

RecyclingPool::Statistics RecyclingPool::statistics() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {in_use_bytes_, idle_bytes_, hits_, misses_, limit_bytes_};
}

bool RecyclingPool::is_new(const char* data) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto block = std::find_if(in_use_.rbegin(), in_use_.rend(),
                                  [&](const Block& each) { return each.data == data; });
  return block != in_use_.rend() && block->released == 0;
}

void RecyclingPool::after_fork_in_child() {
  mutex_.unlock();
  empty();
}

RecyclingPool& recycling_pool() {
  // Never destroyed: tensors may outlive static objects.
  static RecyclingPool* const pool = [] {
    auto* made = new RecyclingPool(default_limit_bytes());
    pthread_atfork([] { recycling_pool().before_fork(); },
                   [] { recycling_pool().after_fork_in_parent(); },
                   [] { recycling_pool().after_fork_in_child(); });
    return made;
  }();
  return *pool;
}

}  // namespace gpudist
