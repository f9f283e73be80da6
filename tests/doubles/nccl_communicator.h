// A communicator of the NCCL double. Communicators are never freed, so that use after the end is
// detected.
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

// Values of ncclResult_t that nccl_abi.h does not have.
constexpr int kCudaError = 1;
constexpr int kSystemError = 2;
constexpr int kInvalidArgument = 4;
constexpr int kRemoteError = 6;

class Communicator {
 public:
  // kAborting: the abort flag is set, but nothing is freed yet.
  enum class State { kLive, kFinalizing, kFinalized, kAborting, kDestroyed, kAborted };

  Communicator(std::shared_ptr<Wire> wire, int rank, int root_rank);

  const int rank;
  const int size;
  const int root_rank;  // in the communicator at the root of the splits
  const std::string name;

  std::atomic<State> state{State::kLive};
  std::atomic<bool> is_aborted{false};
  std::atomic<int> injected_error{0};

  // Numbers of operations in enqueue order; used only by the thread that runs them.
  uint64_t collectives = 0;
  uint64_t rounds = 0;
  uint64_t splits = 0;

  Registrations registrations;

  // Null once the communicator has ended and no work is running.
  std::shared_ptr<Wire> wire();
  // Error of this rank or of all ranks, 0 if there is none; `text` receives a description.
  int error(std::string* text);

  // Only one thread at a time may use the communicator; calls may nest. Returns false if another
  // thread uses it.
  bool enter();
  void leave();
  bool is_used_by_another();

  // Work takes a ticket when enqueued, and runs when all earlier work has finished.
  uint64_t take_ticket();
  void wait_for_turn(uint64_t ticket);
  void end_turn();
  bool has_work();
  // Wait until there is no work.
  void drain();

  // Count a graph with works of this communicator. Like NCCL, ending the communicator waits for its
  // graphs, even after an error.
  void add_graph();
  void drop_graph();
  void wait_for_graphs();

  // Set the abort flag, which ends works and blocked calls. Returns false if the communicator has
  // ended or an abort has begun.
  bool start_abort();
  // Returns false if another thread ended it first.
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

// Null if `comm` was never a communicator.
Communicator* find_communicator(NcclComm comm);

// Both block until all members have called them, and return NCCL's result codes.
int join_communicator(const Address& address, int size, int rank, Communicator** made);
int split_communicator(Communicator& parent, int color, int key, Communicator** made);

}  // namespace gpudist::doubles
