// Memory that the NCCL double sends and receives without a copy: memory registered by the user and,
// during graph capture, all memory mapped by the driver's virtual memory calls. Each rank checks
// only its own address. If the two sides of a message differ, NCCL's kernels hang or read stale
// data; the double refuses.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace gpudist::doubles {

class Registrations {
 public:
  // Reads NCCL_LOCAL_REGISTER and NCCL_GRAPH_REGISTER, which are both on by default.
  Registrations();

  void* add(const void* memory, size_t bytes);
  // Returns false if there is no such handle.
  bool remove(void* handle);

  bool has(const void* memory, size_t bytes, bool is_captured);

 private:
  struct Range {
    const char* start;
    size_t bytes;
  };

  const bool is_local_;
  const bool is_graphs_;
  std::mutex mutex_;
  std::map<void*, std::unique_ptr<Range>> ranges_;  // by handle
};

// Returns "registered memory" or "other memory".
std::string memory_name(bool is_registered);

}  // namespace gpudist::doubles
