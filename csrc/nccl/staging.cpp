#include "nccl/staging.h"

namespace gpudist {

namespace {

constexpr size_t kSmallest = size_t{1} << 20;

// Round up a little, so that slowly growing operations do not reallocate each time.
size_t rounded(size_t bytes) {
  size_t unit = kSmallest;
  while (unit * 16 <= bytes) unit *= 2;
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

char* Staging::of(uint64_t capture, size_t bytes) {
  Allocation& piece = pieces_[capture];
  if (piece.bytes >= bytes) return piece.memory;
  const size_t larger = rounded(bytes);
  char* const memory = allocate_(larger);
  if (piece.memory != nullptr) retire_(piece.memory, capture != 0);
  piece = {memory, larger};
  return memory;
}

std::vector<void*> Staging::take() {
  std::vector<void*> memory;
  for (const auto& [capture, piece] : pieces_) {
    if (piece.memory != nullptr) memory.push_back(piece.memory);
  }
  pieces_.clear();
  return memory;
}

size_t Staging::bytes() const {
  size_t bytes = 0;
  for (const auto& [capture, piece] : pieces_) bytes += piece.bytes;
  return bytes;
}

}  // namespace gpudist
