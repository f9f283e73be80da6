// How the NCCL double runs operations when their turn on the stream has come.
#pragma once

#include <vector>

#include "hooks.h"
#include "nccl_communicator.h"

namespace gpudist::doubles {

enum class Kind { kSend, kRecv, kBroadcast, kReduce, kAllReduce, kReduceScatter, kAllGather };

const char* kind_name(Kind kind);
inline bool is_message(Kind kind) {
  return kind == Kind::kSend || kind == Kind::kRecv;
}

struct Operation {
  Kind kind;
  const void* from;
  void* to;
  size_t count;  // as in NCCL's arguments: per block if there are several
  int dtype;
  int op;    // of a reduction, otherwise -1
  int peer;  // peer or root, otherwise -1
  DeviceStream stream;
  Fault fault = Fault::kNone;
  bool is_registered = false;  // whether the memory it uses is registered

  size_t bytes() const;
  // Bytes that this rank reads at `from` and writes at `to`.
  size_t read_bytes(int rank, int size) const;
  size_t written_bytes(int rank, int size) const;
};

// Operations that run together: all messages of a group, or one collective.
using Unit = std::vector<Operation>;

// Returns when the unit is complete, the communicator was aborted, or all its ranks have an error.
void run(Communicator& communicator, Unit& unit);

// Implementations of run(). Return false if the operation was ended early.
bool run_messages(Communicator& communicator, Wire& wire, const Unit& unit, bool crashes);
bool run_collective(Communicator& communicator, Wire& wire, const Operation& operation,
                    bool crashes);

// Marker byte for outputs that have not arrived when an abort ends the wait.
constexpr int kAbortedByte = 0xab;
// Run the armed fault, or kill the process if none is armed.
void crash();

}  // namespace gpudist::doubles
