// Collectives of the NCCL double. First all ranks agree on the operation. Then, in each round,
// every rank publishes a piece and reads what it needs of the others' pieces. Two buffers used in
// turn suffice: a rank writes a piece only after it has seen all pieces of the round before, whose
// writers have finished reading those of the round before that.
#include <algorithm>
#include <cstring>

#include "memory_double.h"
#include "nccl_operations.h"
#include "nccl_reduce.h"

namespace gpudist::doubles {

namespace {

std::string describe(const Agreement& agreement) {
  const Kind kind = static_cast<Kind>(agreement.kind);
  std::string text = std::string(kind_name(kind)) + " of " + std::to_string(agreement.count) + " " +
                     dtype_name(agreement.dtype);
  if (agreement.op >= 0) text += ", " + std::string(op_name(agreement.op));
  if (agreement.root >= 0) text += ", root " + std::to_string(agreement.root);
  return text + ", in " + memory_name(agreement.is_registered);
}

bool same(const Agreement& a, const Agreement& b) {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root &&
         a.count == b.count && a.is_registered == b.is_registered;
}

class Collective {
 public:
  Collective(Communicator& communicator, Wire& wire, const Operation& operation)
      : communicator_(communicator),
        wire_(wire),
        operation_(operation),
        rank_(communicator.rank),
        size_(communicator.size),
        from_(static_cast<const char*>(operation.from)),
        to_(static_cast<char*>(operation.to)),
        bytes_(operation.bytes()),
        piece_(operation.kind == Kind::kReduceScatter ? kSlotBytes / size_ / 16 * 16 : kSlotBytes) {
  }

  bool run(bool crashes) {
    if (!agree() || !may_go_on()) return false;
    if (crashes && bytes_ == 0) crash();
    const size_t rounds = (bytes_ + piece_ - 1) / piece_;
    for (size_t round = 0; round < rounds; ++round) {
      if (!take_round(crashes && round == rounds / 2)) return false;
    }
    return true;
  }

  // Overwrite outputs that have not arrived with a marker.
  void mark_missing() {
    if (operation_.written_bytes(rank_, size_) == 0 || !may_go_on()) return;
    const int blocks = operation_.kind == Kind::kAllGather ? size_ : 1;
    for (int block = 0; block < blocks; ++block) {
      memset(to_ + block * bytes_ + done_, kAbortedByte, bytes_ - done_);
    }
  }

 private:
  template <class Done>
  bool wait(Done done) {
    return wire_.wait(rank_, communicator_.is_aborted, done);
  }

  // Wait until `number` is at least `least` on every rank.
  bool wait_for_all(std::atomic<uint64_t> RankLine::* number, uint64_t least) {
    return wait([&] {
      for (int r = 0; r < size_; ++r) {
        if (wire_.line(r).*number < least) return false;
      }
      return true;
    });
  }

  void tell(std::atomic<uint64_t> RankLine::* number, uint64_t value) {
    wire_.line(rank_).*number = value;
    wire_.ring_all();
  }

  // Whether the operation uses registered memory and is large enough for that to matter.
  bool is_registered() const {
    return operation_.is_registered && bytes_ >= static_cast<size_t>(setting("register_limit"));
  }

  bool agree() {
    const uint64_t number = ++communicator_.collectives;
    const Agreement mine{static_cast<int>(operation_.kind),
                         operation_.dtype,
                         operation_.op,
                         operation_.peer,
                         operation_.count,
                         is_registered()};
    wire_.line(rank_).agreements[number % 2] = mine;
    tell(&RankLine::entered, number);
    if (!wait_for_all(&RankLine::entered, number)) return false;
    for (int r = 0; r < size_; ++r) {
      const Agreement other = wire_.line(r).agreements[number % 2];
      if (same(mine, other)) continue;
      const std::string text = "collective of " + communicator_.name + ": rank " +
                               std::to_string(rank_) + " has " + describe(mine) + ", rank " +
                               std::to_string(r) + " " + describe(other);
      log_violation(text);
      wire_.break_all(text);
      return false;
    }
    return true;
  }

  // Whether the memory that this rank reads and writes still exists.
  bool may_go_on() const {
    return may_touch(from_, operation_.read_bytes(rank_, size_), "a collective") &&
           may_touch(to_, operation_.written_bytes(rank_, size_), "a collective");
  }

  bool take_round(bool crashes) {
    const uint64_t round = ++communicator_.rounds;
    const size_t now = std::min(piece_, bytes_ - done_);
    if (crashes) {
      put(wire_.slot(rank_, round), now / 2);
      crash();
    }
    put(wire_.slot(rank_, round), now);
    tell(&RankLine::written, round);
    if (!wait_for_all(&RankLine::written, round) || !may_go_on()) return false;
    take(round, now);
    done_ += now;
    return true;
  }

  void put(char* slot, size_t now) {
    if (operation_.kind == Kind::kBroadcast && rank_ != operation_.peer) return;
    const int blocks = operation_.kind == Kind::kReduceScatter ? size_ : 1;
    for (int block = 0; block < blocks; ++block) {
      memcpy(slot + block * piece_, from_ + block * bytes_ + done_, now);
    }
  }

  void take(uint64_t round, size_t now) {
    switch (operation_.kind) {
      case Kind::kBroadcast: memcpy(to_ + done_, wire_.slot(operation_.peer, round), now); return;
      case Kind::kAllGather:
        for (int r = 0; r < size_; ++r) memcpy(to_ + r * bytes_ + done_, wire_.slot(r, round), now);
        return;
      case Kind::kReduce:
        if (rank_ == operation_.peer) reduce_slots(round, 0, now);
        return;
      case Kind::kReduceScatter: reduce_slots(round, rank_ * piece_, now); return;
      default: reduce_slots(round, 0, now);
    }
  }

  void reduce_slots(uint64_t round, size_t offset, size_t now) {
    std::vector<const char*> parts;
    for (int r = 0; r < size_; ++r) parts.push_back(wire_.slot(r, round) + offset);
    reduce(parts, to_ + done_, now / dtype_bytes(operation_.dtype), operation_.dtype,
           operation_.op);
  }

  Communicator& communicator_;
  Wire& wire_;
  const Operation& operation_;
  const int rank_;
  const int size_;
  const char* const from_;
  char* const to_;
  const size_t bytes_;  // per block
  const size_t piece_;  // bytes per block and round
  size_t done_ = 0;     // per block
};

}  // namespace

bool run_collective(Communicator& communicator, Wire& wire, const Operation& operation,
                    bool crashes) {
  Collective collective(communicator, wire, operation);
  if (collective.run(crashes)) return true;
  if (communicator.is_aborted) collective.mark_missing();
  return false;
}

}  // namespace gpudist::doubles
