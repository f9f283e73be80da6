// A communicator of the NCCL double. None is ever freed, so that each use after its end is found.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "nccl/nccl_abi.h"
#include "nccl_registration.h"
#include "nccl_wire.h"

namespace gpudist::doubles {

// Of ncclResult_t, beside those of nccl_abi.h.
constexpr int kCudaError = 1;
constexpr int kSystemError = 2;
constexpr int kInvalidArgument = 4;
constexpr int kRemoteError = 6;

class Communicator {
 public:
  // kAborting: the flag is set, and nothing is freed yet.
  enum class State { kLive, kFinalizing, kFinalized, kAborting, kDestroyed, kAborted };

  Communicator(std::shared_ptr<Wire> wire, int rank, int root_rank);

  const int rank;
  const int size;
  const int root_rank;  // in the communicator at the root of the splits
  const std::string name;

  std::atomic<State> state{State::kLive};
  std::atomic<bool> is_aborted{false};
  std::atomic<int> injected_error{0};

  // Of the operations, in the order in which they were enqueued; only their thread uses them.
  uint64_t collectives = 0;
  uint64_t rounds = 0;
  uint64_t splits = 0;

  Registrations registrations;

  // Null when it has ended and nothing runs any more.
  std::shared_ptr<Wire> wire();
  // The error of this rank or of all, 0 if there is none; `text` says more.
  int error(std::string* text);

  // One thread at a time may use it, as often as it likes. False where another does.
  bool enter();
  void leave();
  bool is_used_by_another();

  // Work gets a ticket when it is enqueued, and its turn when all before it has ended.
  uint64_t take_ticket();
  void wait_for_turn(uint64_t ticket);
  void end_turn();
  bool has_work();
  // Return when there is none.
  void drain();

  // Graphs with works of this communicator. As NCCL's, its end waits for theirs, whatever is wrong.
  void add_graph();
  void drop_graph();
  void wait_for_graphs();

  // Let works end, and threads that wait in a call. False where it has ended or is about to.
  bool start_abort();
  // False where another thread was first.
  bool end(State ended);

 private:
  void drop_wire();

  std::mutex mutex_;
  std::condition_variable ended_;
  std::shared_ptr<Wire> wire_;
  uint64_t tickets_ = 0;
  uint64_t turn_ = 0;
  int user_ = 0;
  int uses_ = 0;
  int graphs_ = 0;
};

// Null where it never was one.
Communicator* find_communicator(NcclComm comm);

// Both block until all members have called them. They return NCCL's results.
int join_communicator(const Address& address, int size, int rank, Communicator** made);
int split_communicator(Communicator& parent, int color, int key, Communicator** made);

}  // namespace gpudist::doubles
