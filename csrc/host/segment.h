// Anonymous shared memory: a memfd that peers open through /proc, freed with its last user.
#pragma once

#include <sys/types.h>

#include <cstddef>
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
  // Create a segment filled with zeros.
  explicit Segment(size_t bytes);
  // Map segment `fd` of process `pid`. Ranks that are threads of one process share one mapping.
  Segment(pid_t pid, int fd, size_t bytes);

  char* data() const;
  // Descriptor in the process that created the segment.
  int fd() const;

 private:
  class Mapping;
  static std::map<int, std::weak_ptr<Mapping>>& own();

  std::shared_ptr<Mapping> mapping_;
};

}  // namespace gpudist
