// Device memory for packed and received bytes: one piece for all operations, which run one after
// another, and one for each captured graph. Nothing is allocated after the largest operation has
// been seen.
//
// The memory is never registered with NCCL. Each side of a message decides from its own address
// whether the memory is registered; if the two sides differ, the message hangs or delivers stale
// data.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

namespace gpudist {

class Staging {
 public:
  using Allocate = std::function<char*(size_t bytes)>;
  // Called with memory that a larger piece replaces. A captured graph may still use it.
  using Retire = std::function<void(char* memory, bool is_captured)>;

  Staging(Allocate allocate, Retire retire)
      : allocate_(std::move(allocate)), retire_(std::move(retire)) {}
  Staging(const Staging&) = delete;

  // Return at least `bytes` for the next operation. Memory used during a capture (`capture` is its
  // id) belongs to the captured graph.
  char* of(uint64_t capture, size_t bytes);
  // Pass ownership of all memory to the caller.
  std::vector<void*> take();
  // Total size of all pieces.
  size_t bytes() const;

 private:
  struct Allocation {
    char* memory = nullptr;
    size_t bytes = 0;
  };

  const Allocate allocate_;
  const Retire retire_;
  std::map<uint64_t, Allocation> pieces_;  // by capture id
};

}  // namespace gpudist
