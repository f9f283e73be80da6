// Which memory the NCCL double carries messages from and to without a copy: what users have
// registered, and, while a graph is captured, all that is mapped by the driver's calls for virtual
// memory. Each rank looks at its own address alone; where two of a message differ, NCCL's kernels
// wait for good or take stale data, and the double refuses.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace gpudist::doubles {

class Registrations {
 public:
  // NCCL_LOCAL_REGISTER and NCCL_GRAPH_REGISTER of now; both are on by default.
  Registrations();

  void* add(const void* memory, size_t bytes);
  // False where there is no such handle.
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

// "registered memory" or "other memory".
std::string memory_name(bool is_registered);

}  // namespace gpudist::doubles
