#include "nccl_registration.h"

#include <algorithm>
#include <cstdlib>

#include "memory_double.h"

namespace gpudist::doubles {

namespace {

bool is_on(const char* variable) {
  const char* const value = std::getenv(variable);
  return value == nullptr || std::string(value) != "0";
}

}  // namespace

Registrations::Registrations()
    : is_local_(is_on("NCCL_LOCAL_REGISTER")), is_graphs_(is_on("NCCL_GRAPH_REGISTER")) {}

void* Registrations::add(const void* memory, size_t bytes) {
  auto range = std::make_unique<Range>(Range{static_cast<const char*>(memory), bytes});
  void* const handle = range.get();
  const std::lock_guard<std::mutex> locked(mutex_);
  ranges_[handle] = std::move(range);
  return handle;
}

bool Registrations::remove(void* handle) {
  const std::lock_guard<std::mutex> locked(mutex_);
  return ranges_.erase(handle) == 1;
}

bool Registrations::has(const void* memory, size_t bytes, bool is_captured) {
  if (is_captured && is_graphs_ && is_mapped(memory)) return true;
  if (!is_local_) return false;
  const char* const start = static_cast<const char*>(memory);
  const std::lock_guard<std::mutex> locked(mutex_);
  return std::any_of(ranges_.begin(), ranges_.end(), [&](const auto& entry) {
    const Range& range = *entry.second;
    return start >= range.start && start + bytes <= range.start + range.bytes;
  });
}

std::string memory_name(bool is_registered) {
  return is_registered ? "registered memory" : "other memory";
}

}  // namespace gpudist::doubles
