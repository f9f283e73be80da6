// Groups of the NCCL double: what a thread has called since it opened one.
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
  // The result of ncclGroupEnd. What there is, is enqueued when the outermost group ends.
  int end();
  // Forget what there is, and say `result` at the end of the outermost group.
  void fail(int result);
  // The communicator has been entered for this operation; the group leaves it.
  void add(Communicator& communicator, const Operation& operation);
  // Its abort has begun, and ends with the outermost group.
  void add_abort(Communicator& communicator) { aborts_.push_back(&communicator); }

  bool uses(const Communicator& communicator) const;
  bool uses(DeviceStream stream) const;

 private:
  struct Entry {
    Communicator* communicator;
    Operation operation;
  };
  // The operations of one communicator.
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

// This thread's.
Group& this_group();

// Whether this thread has a group with operations on a stream that have not been enqueued yet.
bool group_uses(DeviceStream stream);

}  // namespace gpudist::doubles
