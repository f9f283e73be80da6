// A message made of several pieces of this rank's memory, sent to some ranks or received from one.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "host/host_communicator.h"

namespace gpudist {

// Address and number of bytes.
using Piece = std::pair<uintptr_t, int64_t>;

// In flight from construction, after `begin`, until wait() returns. Until then the memory must stay
// valid, and bytes to send must not change.
class Pieces {
 public:
  Pieces(HostCommunicator& communicator, const Signature& signature, Transfer::Kind kind,
         const std::vector<int>& peers, const std::vector<Piece>& pieces);
  ~Pieces() { end(); }
  // Without a preceding wait() this makes the communicator unusable. Blocks while a thread is
  // inside it.
  void end();
  Pieces(const Pieces&) = delete;

  void wait();

 private:
  HostCommunicator& communicator_;
  std::vector<BoxView> boxes_;
  std::vector<Transfer> transfers_;
  SharedPacking packing_;
  bool complete_ = false;
};

}  // namespace gpudist
