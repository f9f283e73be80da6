// Device memory for packed and received bytes: one piece for all operations, which run one after
// another, those of captured graphs included. Nothing is allocated after the largest operation has
// been seen.
//
// The memory is never registered with NCCL. Each side of a message decides from its own address
// whether the memory is registered; if the two sides differ, the message hangs or delivers stale
// data.
#pragma once

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

namespace gpudist {

class Staging {
 public:
  using Allocate = std::function<char*(size_t bytes)>;
  // Called with memory that is too small, before a larger piece is allocated: `release` once the
  // operations so far no longer use it, `keep` if a captured graph may use it at any time.
  using Retire = std::function<void(char* memory)>;

  Staging(Allocate allocate, Retire release, Retire keep)
      : allocate_(std::move(allocate)), release_(std::move(release)), keep_(std::move(keep)) {}
  Staging(const Staging&) = delete;

  // Return at least `bytes` for the next operation.
  char* of(bool is_captured, size_t bytes);
  // Pass ownership of the memory to the caller, except for what was kept.
  char* take() { return std::exchange(memory_, nullptr); }
  // Total size, with what was kept.
  size_t bytes() const { return bytes_ + kept_bytes_; }

 private:
  void retire();

  const Allocate allocate_;
  const Retire release_, keep_;
  char* memory_ = nullptr;
  size_t bytes_ = 0, kept_bytes_ = 0;
  bool is_captured_ = false;  // whether a captured graph uses the memory
};

}  // namespace gpudist
