// Anonymous shared memory, freed with its last user: a memfd that other processes open through
// /proc, or memory of this process alone.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "core/errors.h"

namespace gpudist {

// The process that created the segment has released it or has ended.
struct SegmentGone : TransportError {
  using TransportError::TransportError;
};

class Segment {
 public:
  Segment() = default;
  // Create a segment filled with zeros. Only a shared one has a descriptor, and is seen by other
  // processes.
  Segment(size_t bytes, bool is_shared);
  // Map segment `id` of process `pid`. Ranks that are threads of one process share one mapping.
  Segment(pid_t pid, int64_t id, size_t bytes);

  char* data() const;
  // Name of the segment in the process that created it: its descriptor, or else its address.
  int64_t id() const;

 private:
  class Mapping;
  static std::map<int64_t, std::weak_ptr<Mapping>>& own();

  std::shared_ptr<Mapping> mapping_;
};

}  // namespace gpudist
