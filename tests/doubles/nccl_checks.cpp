#include "nccl_checks.h"

#include <algorithm>
#include <climits>

#include "nccl_reduce.h"
#include "stream_double.h"

namespace gpudist::doubles {

namespace {

// First version of ncclConfig_t of which NCCL reads more than `size`.
constexpr unsigned kFirstConfigVersion = 21400;

struct Span {
  const char* start;
  size_t bytes;
  bool is_written;
};

bool overlap(const Span& a, const Span& b) {
  return a.bytes > 0 && b.bytes > 0 && a.start < b.start + b.bytes && b.start < a.start + a.bytes;
}

Span read_span(const Operation& operation, const Communicator& communicator) {
  return {static_cast<const char*>(operation.from),
          operation.read_bytes(communicator.rank, communicator.size), false};
}

Span written_span(const Operation& operation, const Communicator& communicator) {
  return {static_cast<const char*>(operation.to),
          operation.written_bytes(communicator.rank, communicator.size), true};
}

std::string on(const Operation& operation, const Communicator& communicator) {
  return std::string(kind_name(operation.kind)) + " on " + communicator.name + ": ";
}

// Address of the input of an in-place collective.
const char* place_of_input(const Operation& operation, const Communicator& communicator) {
  const char* to = static_cast<const char*>(operation.to);
  const size_t before = communicator.rank * operation.bytes();
  if (operation.kind == Kind::kAllGather) return to + before;
  if (operation.kind == Kind::kReduceScatter) return to - before;
  return to;
}

int check_self_messages(Communicator& communicator, const Unit& unit) {
  std::vector<const Operation*> sends, receives;
  for (const Operation& operation : unit) {
    if (operation.peer != communicator.rank) continue;
    (operation.kind == Kind::kSend ? sends : receives).push_back(&operation);
  }
  const bool match =
      std::equal(sends.begin(), sends.end(), receives.begin(), receives.end(),
                 [](const Operation* send, const Operation* receive) {
                   return send->count == receive->count && send->dtype == receive->dtype;
                 });
  if (match) return kNcclSuccess;
  return refuse(kNcclInvalidUsage,
                "messages on " + communicator.name +
                    ": those of a rank to itself have no equal receives in the same group");
}

// A message of a rank to itself that is there already.
bool are_in_place(const Operation& a, const Operation& b, int rank) {
  const void* first = a.kind == Kind::kSend ? a.from : a.to;
  const void* second = b.kind == Kind::kSend ? b.from : b.to;
  return a.kind != b.kind && a.peer == rank && b.peer == rank && first == second;
}

// Messages of a unit run concurrently: none may write bytes that another reads or writes.
int check_overlaps(Communicator& communicator, const Unit& unit) {
  std::vector<Span> spans;
  for (const Operation& operation : unit) {
    spans.push_back(operation.kind == Kind::kSend ? read_span(operation, communicator)
                                                  : written_span(operation, communicator));
  }
  for (size_t i = 0; i < spans.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (are_in_place(unit[i], unit[j], communicator.rank)) continue;
      if ((spans[i].is_written || spans[j].is_written) && overlap(spans[i], spans[j])) {
        return refuse(kNcclInvalidUsage,
                      "messages on " + communicator.name + ": buffers of one group overlap");
      }
    }
  }
  return kNcclSuccess;
}

}  // namespace

int check_usable(const char* call, NcclComm comm, Communicator** communicator) {
  *communicator = find_communicator(comm);
  const std::string prefix = std::string(call) + ": ";
  if (*communicator == nullptr) return refuse(kInvalidArgument, prefix + "no such communicator");
  switch ((*communicator)->state.load()) {
    case Communicator::State::kAborting:
      // The communicator still exists, but calls no longer have an effect.
      set_last_error(prefix + "the communicator is being aborted");
      return kNcclInvalidUsage;
    case Communicator::State::kFinalizing:
    case Communicator::State::kFinalized:
      return refuse(kNcclInvalidUsage, prefix + "the communicator has been finalized");
    case Communicator::State::kDestroyed:
      return refuse(kNcclInvalidUsage, prefix + "the communicator has been destroyed");
    case Communicator::State::kAborted:
      return refuse(kNcclInvalidUsage, prefix + "the communicator has been aborted");
    default: return kNcclSuccess;
  }
}

int check_operation(Communicator& communicator, const Operation& operation) {
  const std::string prefix = on(operation, communicator);
  std::string text;
  if (const int error = communicator.error(&text)) {
    set_last_error(text);
    return error;
  }
  if (dtype_bytes(operation.dtype) == 0) return refuse(kInvalidArgument, prefix + "unknown dtype");
  const bool reduces = operation.kind == Kind::kReduce || operation.kind == Kind::kAllReduce ||
                       operation.kind == Kind::kReduceScatter;
  if (reduces && (operation.op < kNcclSum || operation.op > kNcclMin)) {
    return refuse(kInvalidArgument, prefix + "unknown reduction");
  }
  const bool has_peer = is_message(operation.kind) || operation.kind == Kind::kBroadcast ||
                        operation.kind == Kind::kReduce;
  if (has_peer && (operation.peer < 0 || operation.peer >= communicator.size)) {
    return refuse(kInvalidArgument, prefix + "no rank " + std::to_string(operation.peer) +
                                        " among " + std::to_string(communicator.size));
  }
  const Span reads = read_span(operation, communicator);
  const Span writes = written_span(operation, communicator);
  if ((reads.bytes > 0 && reads.start == nullptr) ||
      (writes.bytes > 0 && writes.start == nullptr)) {
    return refuse(kInvalidArgument, prefix + "a null pointer");
  }
  if (overlap(reads, writes) && reads.start != place_of_input(operation, communicator)) {
    return refuse(kInvalidArgument, prefix + "input and output overlap, and are not in place");
  }
  if (!is_stream(operation.stream)) return refuse(kInvalidArgument, prefix + "no such stream");

  const auto wire = communicator.wire();
  const int destroyed =
      is_message(operation.kind)
          ? (wire->line(operation.peer).state == RankState::kDestroyed ? operation.peer : -1)
          : wire->find_destroyed();
  if (destroyed >= 0) {
    return refuse(kNcclInvalidUsage,
                  prefix + "rank " + std::to_string(destroyed) + " has destroyed it");
  }
  return kNcclSuccess;
}

int check_launch(Communicator& communicator, const std::vector<Unit>& units) {
  for (const Unit& unit : units) {
    for (const Operation& operation : unit) {
      if (operation.stream != units[0][0].stream) {
        return refuse(kNcclInvalidUsage, "group on " + communicator.name +
                                             ": several streams, for which there is no "
                                             "double");
      }
    }
    if (!is_message(unit[0].kind)) continue;
    if (const int refused = check_self_messages(communicator, unit)) return refused;
    if (const int refused = check_overlaps(communicator, unit)) return refused;
  }
  return kNcclSuccess;
}

int check_config(const char* call, const NcclConfig* config) {
  const NcclConfig plain;
  if (config == nullptr) return kNcclSuccess;
  const std::string prefix = std::string(call) + ": the config ";
  if (config->magic != plain.magic) return refuse(kInvalidArgument, prefix + "has another magic");
  if (config->size != sizeof(NcclConfig)) return refuse(kInvalidArgument, prefix + "has no size");
  if (config->version < kFirstConfigVersion) {
    return refuse(kInvalidArgument, prefix + "has no version, without which NCCL reads no member");
  }
  if (config->blocking != INT_MIN && config->blocking != 0 && config->blocking != 1) {
    return refuse(kInvalidArgument, prefix + "is neither blocking nor not");
  }
  const auto is_count = [](int value) { return value == INT_MIN || value > 0; };
  if (!is_count(config->min_ctas) || !is_count(config->max_ctas) ||
      (config->max_ctas != INT_MIN && config->min_ctas > config->max_ctas)) {
    return refuse(kInvalidArgument, prefix + "has impossible numbers of CTAs");
  }
  return kNcclSuccess;
}

}  // namespace gpudist::doubles
