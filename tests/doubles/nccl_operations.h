// How the NCCL double carries out operations, once they have their turn on their stream.
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
  size_t count;  // as NCCL counts: of one block, where there are several
  int dtype;
  int op;    // of a reduction, else -1
  int peer;  // or root, else -1
  DeviceStream stream;
  Fault fault = Fault::kNone;
  bool is_registered = false;  // the memory that it uses

  size_t bytes() const;
  // Bytes of `from` that this rank reads, and of `to` that it writes.
  size_t read_bytes(int rank, int size) const;
  size_t written_bytes(int rank, int size) const;
};

// What is done as one: all messages of a group, or one collective.
using Unit = std::vector<Operation>;

// Returns when it is complete, or the communicator was aborted, or an error set on all its ranks.
void run(Communicator& communicator, Unit& unit);

// The two that run() chooses from: false where something ended them.
bool run_messages(Communicator& communicator, Wire& wire, const Unit& unit, bool crashes);
bool run_collective(Communicator& communicator, Wire& wire, const Operation& operation,
                    bool crashes);

// What an abort leaves in outputs that have not come.
constexpr int kAbortedByte = 0xab;
// Do what was armed; a process for which nothing was is killed.
void crash();

}  // namespace gpudist::doubles
