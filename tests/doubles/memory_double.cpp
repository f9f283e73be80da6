#include "memory_double.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "device_double.h"
#include "hooks.h"

namespace gpudist::doubles {

namespace {

constexpr size_t kAlignment = 512;
constexpr int kFreshByte = 0xcd;

struct Allocation {
  MemoryKind kind;
  int device;
  size_t bytes;
  char* pages;
  size_t page_bytes;
  const char* ended_by = nullptr;
};

struct Memory {
  std::mutex mutex;
  std::map<const char*, Allocation> all;  // released allocations, too
};

Memory& memory_of_device() {
  static Memory& memory = *new Memory;
  return memory;
}

size_t rounded_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// The last allocation that begins at or before an address and had not ended before it, or null.
const Allocation* find(const Memory& memory, const void* address) {
  const auto after = memory.all.upper_bound(static_cast<const char*>(address));
  if (after == memory.all.begin()) return nullptr;
  const auto& [start, allocation] = *std::prev(after);
  return static_cast<const char*>(address) < start + allocation.bytes ? &allocation : nullptr;
}

}  // namespace

// The page behind the memory is inaccessible.
void* take_memory(MemoryKind kind, int device, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t rounded = rounded_up(bytes, kAlignment);
  const size_t needed = rounded_up(rounded, page) + page;
  if (bytes == 0 || needed < bytes) return nullptr;
  void* const pages =
      mmap(nullptr, needed, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  char* const end = static_cast<char*>(pages) + needed - page;
  mprotect(end, page, PROT_NONE);
  char* const start = end - rounded;
  memset(start, kFreshByte, rounded);
  const std::lock_guard<std::mutex> locked(memory_of_device().mutex);
  memory_of_device().all[start] = {kind, device, rounded, static_cast<char*>(pages), needed};
  return start;
}

int device_of(MemoryKind kind, const void* memory) {
  const std::lock_guard<std::mutex> locked(memory_of_device().mutex);
  const auto found = memory_of_device().all.find(static_cast<const char*>(memory));
  const bool is_there = found != memory_of_device().all.end() && found->second.kind == kind &&
                        found->second.ended_by == nullptr;
  return is_there ? found->second.device : -1;
}

void end_memory(void* memory, const char* call) {
  const std::lock_guard<std::mutex> locked(memory_of_device().mutex);
  Allocation& allocation = memory_of_device().all.at(static_cast<const char*>(memory));
  allocation.ended_by = call;
  // Keep the addresses reserved but release the memory.
  mprotect(allocation.pages, allocation.page_bytes, PROT_NONE);
  madvise(allocation.pages, allocation.page_bytes, MADV_DONTNEED);
}

bool is_mapped(const void* memory) {
  const bool is_torchs_mapped = setting("expandable_segments") != 0;
  const std::lock_guard<std::mutex> locked(memory_of_device().mutex);
  const Allocation* const found = find(memory_of_device(), memory);
  return found == nullptr ? is_torchs_mapped : found->kind == MemoryKind::kMapped;
}

bool may_touch(const void* memory, size_t bytes, const char* what) {
  if (is_device_broken()) return false;
  if (memory == nullptr || bytes == 0) return true;
  std::string text;
  {
    const std::lock_guard<std::mutex> locked(memory_of_device().mutex);
    const Allocation* const found = find(memory_of_device(), memory);
    if (found == nullptr || found->ended_by == nullptr) return true;
    text = std::string(what) + " touches memory that " + found->ended_by + " has ended";
  }
  break_device(text);
  return false;
}

}  // namespace gpudist::doubles
