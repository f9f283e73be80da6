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

char* Staging::of(bool is_captured, size_t bytes) {
  if (bytes_ < bytes) {
    retire();
    memory_ = allocate_(rounded(bytes));
    bytes_ = rounded(bytes);
  }
  is_captured_ |= is_captured;
  return memory_;
}

void Staging::retire() {
  char* const memory = take();
  const size_t bytes = std::exchange(bytes_, 0);
  if (memory == nullptr) return;
  if (std::exchange(is_captured_, false)) {
    kept_bytes_ += bytes;
    keep_(memory);
  } else {
    release_(memory);
  }
}

}  // namespace gpudist
