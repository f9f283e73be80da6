#include "staging.h"

#include <algorithm>

#include "device.h"

namespace gpudist {

namespace {

constexpr size_t kSmallest = size_t{1} << 20;

}  // namespace

char* Staging::of(DeviceStream stream, uint64_t capture, size_t bytes) {
  if (capture == 0 && !retired_.empty()) release_retired();
  Piece& piece = pieces_[{stream, capture}];
  if (piece.bytes >= bytes) return piece.memory;
  size_t larger = std::max(kSmallest, piece.bytes);
  while (larger < bytes) larger *= 2;
  char* const memory = allocate_(larger);
  if (piece.memory != nullptr) retire(stream, capture, piece.memory);
  piece = {memory, larger};
  return memory;
}

void Staging::retire(DeviceStream stream, uint64_t capture, char* memory) {
  DeviceEvent event = nullptr;
  if (capture == 0) {
    check_device(api_, api_.create_event(&event), "creating an event");
    check_device(api_, api_.record_event(event, stream), "recording an event");
  }
  retired_.push_back({memory, event});
}

void Staging::release_retired() {
  const auto is_unused = [&](const Retired& old) {
    bool is_complete = false;
    if (old.event == nullptr || api_.query_event(old.event, &is_complete) != 0) return false;
    if (!is_complete) return false;
    api_.destroy_event(old.event);
    release_(old.memory);
    return true;
  };
  retired_.erase(std::remove_if(retired_.begin(), retired_.end(), is_unused), retired_.end());
}

size_t Staging::bytes() const {
  size_t bytes = 0;
  for (const auto& [key, piece] : pieces_) bytes += piece.bytes;
  return bytes;
}

void Staging::clear() {
  for (const auto& [key, piece] : pieces_) {
    if (piece.memory != nullptr) release_(piece.memory);
  }
  for (const Retired& old : retired_) {
    if (old.event != nullptr) api_.destroy_event(old.event);
    release_(old.memory);
  }
  pieces_.clear();
  retired_.clear();
}

}  // namespace gpudist
