// One message that lies in several pieces of this rank's memory, to some ranks or from one.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host/host_communicator.h"

namespace gpudist {

// Address and bytes.
using Piece = std::pair<uintptr_t, int64_t>;

// On its way from when it is made until it has been waited for; so long its memory must live, and
// what is sent must not change.
class Pieces {
 public:
  Pieces(HostCommunicator& communicator, const Signature& signature, Transfer::Kind kind,
         const std::vector<int>& peers, const std::vector<Piece>& pieces);
  ~Pieces() { end(); }
  // One that was not waited for leaves the communicator unusable; waits for a thread inside it.
  void end();
  Pieces(const Pieces&) = delete;

  void wait();

 private:
  HostCommunicator& communicator_;
  std::vector<BoxView> boxes_;
  std::vector<Transfer> transfers_;
  bool complete_ = false;
};

}  // namespace gpudist
