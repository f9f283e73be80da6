// One message, or one copy within a rank, on its way.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/packing.h"

namespace gpudist {

// What an operation is called, and the 16 bytes by which ranks tell whether they mean the same.
struct Signature {
  std::string label;
  std::string digest;
};

struct Transfer {
  // kOwn moves boxes of `source` to boxes of `tensor`, both this rank's.
  enum class Kind { kSend, kReceive, kOwn };

  Kind kind = Kind::kSend;
  int peer = -1;
  int64_t bytes = 0;
  char* tensor = nullptr;
  const std::vector<BoxView>* boxes = nullptr;
  const char* source = nullptr;
  const std::vector<BoxView>* source_boxes = nullptr;
  bool adds = false;
  Dtype dtype = Dtype::kUint8;
  // What must be complete before this one touches the tensor; where it `streams`, both go over the
  // same cells in the same order, and this one need only stay behind.
  const Transfer* after = nullptr;
  bool streams = false;
  // Of a send: whether something is to come back from the same peer.
  bool is_answered = false;
  // Of a receive: cells of this rank to which what comes is added, in place of what `tensor` has.
  const char* own = nullptr;
  const Signature* signature = nullptr;

  uint64_t sequence = 0;
  int64_t moved = 0;
  bool header_done = false;
  bool complete = false;
  BoxStream stream;
  // Of kOwn: where it reads. Of a receive that pulls: where the sender's cells are, in its memory.
  BoxStream source_stream;
  BoxStream own_stream;
  bool pulls = false;
  std::vector<BoxView> pulled_boxes;
  // Of a send that is pulled: its number among those to this peer, and, of short rows, a copy in
  // one piece.
  uint64_t lent = 0;
  std::shared_ptr<char> packed;
  std::vector<BoxView> packed_boxes;

  // Put the next bytes of the message where they belong.
  void unpack(const char* in, int64_t bytes) {
    if (own != nullptr) {
      stream.scatter_sum(tensor, own, own_stream, in, bytes, dtype);
    } else if (adds) {
      stream.scatter_add(tensor, in, bytes, dtype);
    } else {
      stream.scatter(tensor, in, bytes);
    }
  }

  // Bytes up to which it may go now.
  int64_t limit() const {
    if (after == nullptr || after->complete) return bytes;
    return streams ? after->moved : 0;
  }
};

}  // namespace gpudist
