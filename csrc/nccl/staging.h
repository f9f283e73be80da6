// Device memory for what is packed and what arrives: one piece for all operations, which follow one
// another, and one for each captured graph. No operation allocates once the largest has been met.
//
// It is plain memory and never registered with NCCL: NCCL decides on each side of a message from
// its own address whether the memory is registered, and a message between the two kinds hangs, or
// brings cells of an earlier one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace gpudist {

class Staging {
 public:
  using Allocate = std::function<char*(size_t bytes)>;
  // Of memory that a larger piece replaces. A captured graph may still use it.
  using Retire = std::function<void(char* memory, bool is_captured)>;

  Staging(Allocate allocate, Retire retire)
      : allocate_(std::move(allocate)), retire_(std::move(retire)) {}
  Staging(const Staging&) = delete;

  // At least `bytes`, for the next operation. What a graph uses, of which `capture` is the number,
  // belongs to that graph.
  char* of(uint64_t capture, size_t bytes);
  // Everything, for who releases it.
  std::vector<void*> take();
  // In all.
  size_t bytes() const;

 private:
  struct Piece {
    char* memory = nullptr;
    size_t bytes = 0;
  };

  const Allocate allocate_;
  const Retire retire_;
  std::map<uint64_t, Piece> pieces_;  // by capture
};

}  // namespace gpudist
