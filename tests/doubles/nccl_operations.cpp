#include "nccl_operations.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "nccl_reduce.h"
#include "strike.h"

namespace gpudist::doubles {

namespace {

constexpr auto kDelay = std::chrono::milliseconds(300);

bool has(const Unit& unit, Fault fault) {
  return std::any_of(unit.begin(), unit.end(),
                     [&](const Operation& operation) { return operation.fault == fault; });
}

}  // namespace

const char* kind_name(Kind kind) {
  constexpr const char* kNames[] = {"send",       "recv",           "broadcast", "reduce",
                                    "all_reduce", "reduce_scatter", "all_gather"};
  return kNames[static_cast<int>(kind)];
}

size_t Operation::bytes() const {
  return count * dtype_bytes(dtype);
}

size_t Operation::read_bytes(int rank, int size) const {
  if (kind == Kind::kRecv || (kind == Kind::kBroadcast && rank != peer)) return 0;
  return kind == Kind::kReduceScatter ? size * bytes() : bytes();
}

size_t Operation::written_bytes(int rank, int size) const {
  if (kind == Kind::kSend || (kind == Kind::kReduce && rank != peer)) return 0;
  return kind == Kind::kAllGather ? size * bytes() : bytes();
}

void crash() {
  if (strike()) return;
  kill(getpid(), SIGKILL);
  std::abort();
}

void run(Communicator& communicator, Unit& unit) {
  const auto wire = communicator.wire();
  if (wire == nullptr) {
    log_violation("a work of " + communicator.name + " runs after its end");
    return;
  }
  if (has(unit, Fault::kDelay)) std::this_thread::sleep_for(kDelay);
  if (has(unit, Fault::kAsyncError)) communicator.injected_error = kRemoteError;
  if (has(unit, Fault::kAsyncError) || has(unit, Fault::kStall)) {
    wire->wait(communicator.rank, communicator.is_aborted, [] { return false; });
  }
  const bool crashes = has(unit, Fault::kCrash);
  if (is_message(unit[0].kind)) {
    run_messages(communicator, *wire, unit, crashes);
  } else {
    run_collective(communicator, *wire, unit[0], crashes);
  }
}

}  // namespace gpudist::doubles
