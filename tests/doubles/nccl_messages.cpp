// Sends and receives of one group of the NCCL double: all in flight together, with messages between
// two ranks in order. A send completes when its last byte has been received.
#include <algorithm>
#include <cstring>

#include "memory_double.h"
#include "nccl_operations.h"
#include "nccl_reduce.h"

namespace gpudist::doubles {

namespace {

constexpr size_t kStepBytes = 32 << 10;

// Precedes the bytes of each message.
struct Envelope {
  uint64_t count;
  int32_t dtype;
  bool is_registered;
};

// Messages of a unit to one peer, or from one peer.
class Lane {
 public:
  Lane(Channel& channel, int peer, bool is_send)
      : peer(peer), is_send(is_send), channel_(channel) {}

  void add(const Operation& operation) { operations_.push_back(&operation); }

  bool done() const {
    if (current_ < operations_.size()) return false;
    return !is_send || channel_.read == channel_.written;
  }

  // Move at most `limit` bytes; returns whether any were moved. Sets `mismatch` if the peer's
  // message is not the one this rank expects.
  bool step(size_t limit, size_t* moved, std::string* mismatch) {
    if (current_ == operations_.size()) return false;
    const Operation& operation = *operations_[current_];
    if (!has_envelope_) {
      if (!(is_send ? put_envelope(operation) : take_envelope(operation, mismatch))) return false;
      has_envelope_ = true;
    }
    const size_t bytes = std::min({operation.bytes() - done_, limit, room()});
    if (!may_touch(place(operation), bytes, "a message")) return false;
    if (is_send) {
      put(static_cast<const char*>(operation.from) + done_, bytes);
    } else {
      take(static_cast<char*>(operation.to) + done_, bytes);
    }
    done_ += bytes;
    *moved += bytes;
    if (done_ < operation.bytes()) return bytes > 0;
    ++current_;
    done_ = 0;
    has_envelope_ = false;
    return true;
  }

  // Overwrite outputs that have not arrived with a marker.
  void mark_missing() const {
    for (size_t i = current_; i < operations_.size() && !is_send; ++i) {
      const size_t done = i == current_ ? done_ : 0;
      const size_t missing = operations_[i]->bytes() - done;
      char* const at = static_cast<char*>(operations_[i]->to) + done;
      if (missing > 0 && may_touch(at, missing, "a message")) memset(at, kAbortedByte, missing);
    }
  }

  const int peer;
  const bool is_send;

 private:
  const void* place(const Operation& operation) const {
    return static_cast<const char*>(is_send ? operation.from : operation.to) + done_;
  }

  // Number of bytes that can be written or read now.
  size_t room() const {
    const uint64_t waiting = channel_.written - channel_.read;
    return is_send ? kRingBytes - waiting : waiting;
  }

  void put(const char* from, size_t bytes) {
    const size_t at = channel_.written % kRingBytes;
    const size_t first = std::min(bytes, kRingBytes - at);
    if (first > 0) memcpy(channel_.ring + at, from, first);
    if (bytes > first) memcpy(channel_.ring, from + first, bytes - first);
    channel_.written += bytes;
  }

  void take(char* to, size_t bytes) {
    const size_t at = channel_.read % kRingBytes;
    const size_t first = std::min(bytes, kRingBytes - at);
    if (first > 0) memcpy(to, channel_.ring + at, first);
    if (bytes > first) memcpy(to + first, channel_.ring, bytes - first);
    channel_.read += bytes;
  }

  bool put_envelope(const Operation& operation) {
    const Envelope envelope{operation.count, operation.dtype, operation.is_registered};
    if (room() < sizeof(envelope)) return false;
    put(reinterpret_cast<const char*>(&envelope), sizeof(envelope));
    return true;
  }

  bool take_envelope(const Operation& operation, std::string* mismatch) {
    Envelope envelope{};
    if (room() < sizeof(envelope)) return false;
    take(reinterpret_cast<char*>(&envelope), sizeof(envelope));
    if (envelope.count != operation.count || envelope.dtype != operation.dtype) {
      *mismatch = "sends " + std::to_string(envelope.count) + " of " + dtype_name(envelope.dtype) +
                  ", and is expected to send " + std::to_string(operation.count) + " of " +
                  dtype_name(operation.dtype);
      return false;
    }
    const bool is_small = operation.bytes() < static_cast<size_t>(setting("register_limit"));
    if (is_small || envelope.is_registered == operation.is_registered) return true;
    *mismatch = "sends " + std::to_string(operation.bytes()) + " bytes from " +
                memory_name(envelope.is_registered) + ", which are to arrive in " +
                memory_name(operation.is_registered);
    return false;
  }

  Channel& channel_;
  std::vector<const Operation*> operations_;
  size_t current_ = 0;
  size_t done_ = 0;  // bytes of the current message
  bool has_envelope_ = false;
};

Lane& lane_of(std::vector<Lane>& lanes, Wire& wire, int rank, const Operation& operation) {
  const bool is_send = operation.kind == Kind::kSend;
  for (Lane& lane : lanes) {
    if (lane.peer == operation.peer && lane.is_send == is_send) return lane;
  }
  Channel& channel =
      is_send ? wire.channel(rank, operation.peer) : wire.channel(operation.peer, rank);
  return lanes.emplace_back(channel, operation.peer, is_send);
}

}  // namespace

bool run_messages(Communicator& communicator, Wire& wire, const Unit& unit, bool crashes) {
  bool is_to_crash = crashes;
  std::vector<Lane> lanes;
  size_t total = 0;
  for (const Operation& operation : unit) {
    lane_of(lanes, wire, communicator.rank, operation).add(operation);
    total += operation.bytes();
  }
  const size_t limit = crashes ? std::max<size_t>(1, std::min(total / 4, kStepBytes)) : kStepBytes;
  size_t moved = 0;
  const auto is_done = [&] {
    return std::all_of(lanes.begin(), lanes.end(), [](const Lane& lane) { return lane.done(); });
  };
  const auto step_all = [&] {
    bool any = false;
    for (Lane& lane : lanes) {
      std::string mismatch;
      if (lane.step(limit, &moved, &mismatch)) {
        any = true;
        wire.ring(lane.peer);
      }
      if (!mismatch.empty()) {
        const std::string text = "messages to rank " + std::to_string(communicator.rank) + " of " +
                                 communicator.name + ": rank " + std::to_string(lane.peer) + " " +
                                 mismatch;
        log_violation(text);
        wire.break_all(text);
        return false;
      }
      if (is_to_crash && 2 * moved >= total) {
        is_to_crash = false;
        crash();
      }
    }
    return any || is_done();
  };
  while (!is_done()) {
    if (wire.wait(communicator.rank, communicator.is_aborted, step_all)) continue;
    if (communicator.is_aborted) {
      for (const Lane& lane : lanes) lane.mark_missing();
    }
    return false;
  }
  return true;
}

}  // namespace gpudist::doubles
