// A message, or a copy within a rank, in progress.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/packing.h"

namespace gpudist {

// Name of an operation, and the 16-byte digest by which ranks check that they run the same one.
struct Signature {
  std::string label;
  std::string digest;
};

// Sends of the same cells to several ranks. Each piece after the first is packed once, into a slot
// that all of them read.
struct SharedPacking {
  int receivers = 0;
  std::vector<int> slot_of;  // for each piece; -1: no slot was free, and each send packs it
};

struct Transfer {
  // kOwn copies boxes of `source` to boxes of `tensor` within this rank.
  enum class Kind { kSend, kReceive, kOwn };

  Kind kind = Kind::kSend;
  int peer = -1;
  int64_t bytes = 0;
  char* tensor = nullptr;
  const std::vector<BoxView>* boxes = nullptr;
  const char* source = nullptr;
  const std::vector<BoxView>* source_boxes = nullptr;
  bool adds = false;
  bool past_cache = false;
  Dtype dtype = Dtype::kUint8;
  // Transfer that must complete before this one touches the tensor. If `streams`, both visit the
  // same cells in the same order, and this one only has to stay behind.
  const Transfer* after = nullptr;
  bool streams = false;
  // Receive: cells of this rank to add the message to, instead of those of `tensor`.
  const char* own = nullptr;
  const Signature* signature = nullptr;
  // Send: what it shares with others, which go to other ranks.
  SharedPacking* shared = nullptr;

  uint64_t sequence = 0;
  // What this rank and the peer must have been given before, see `Given`.
  uint64_t given = 0;
  int64_t moved = 0;
  bool header_done = false;
  bool complete = false;
  BoxStream stream;
  // The cells to read of kOwn and of a receive from a `lender`.
  BoxStream source_stream;
  BoxStream own_stream;
  // Receive: the send whose cells to read, if the peer is a thread of this process and lends them.
  const Transfer* lender = nullptr;
  // Send whose cells the peer reads: its number among those to this peer.
  uint64_t lent = 0;

  // Copy or add the next bytes of the message to their cells.
  void unpack(const char* in, int64_t bytes) {
    if (own != nullptr) {
      stream.scatter_sum(tensor, own, own_stream, in, bytes, dtype);
    } else if (adds) {
      stream.scatter_add(tensor, in, bytes, dtype);
    } else {
      stream.scatter(tensor, in, bytes, past_cache);
    }
  }

  // Number of bytes that may be moved before `after` makes more progress.
  int64_t limit() const {
    if (after == nullptr || after->complete) return bytes;
    return streams ? after->moved : 0;
  }
};

}  // namespace gpudist
