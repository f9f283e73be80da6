// Groups of the NCCL double: the calls of a thread since it opened a group.
#pragma once

#include <utility>
#include <vector>

#include "nccl_operations.h"

namespace gpudist::doubles {

class Group {
 public:
  ~Group();

  int depth() const { return depth_; }
  void start() { ++depth_; }
  // Result of ncclGroupEnd. Operations are enqueued when the outermost group ends.
  int end();
  // Drop the group's operations; the outermost group's end returns `result`.
  void fail(int result);
  // Add an operation whose communicator has been entered; the group leaves it.
  void add(Communicator& communicator, const Operation& operation);
  // Add a communicator whose abort has begun and finishes with the outermost group.
  void add_abort(Communicator& communicator) { aborts_.push_back(&communicator); }

  bool uses(const Communicator& communicator) const;
  bool uses(DeviceStream stream) const;

 private:
  struct Entry {
    Communicator* communicator;
    Operation operation;
  };
  // Operations on one communicator.
  struct Launch {
    Communicator* communicator;
    std::vector<Unit> units;
  };

  std::vector<Launch> launches() const;
  int connect_all();
  int enqueue_all();
  void leave_all();

  int depth_ = 0;
  int result_ = 0;
  std::vector<Entry> entries_;
  std::vector<Communicator*> aborts_;
};

// Group of the calling thread.
Group& this_group();

// Whether this thread's group has operations on the stream that are not enqueued yet.
bool group_uses(DeviceStream stream);

}  // namespace gpudist::doubles
