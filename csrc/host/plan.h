// One stage of a plan, bound to shapes, strides and a dtype. One call packs, exchanges, unpacks and
// fills.
#pragma once

#include <cstdint>
#include <list>
#include <utility>
#include <vector>

#include "core/packing.h"
#include "host/host_communicator.h"

namespace gpudist {

struct BoundMessage {
  int peer;  // -1: this rank
  std::vector<BoxView> boxes;
  int64_t bytes;
  // Index of the first message of the same cells, and how many there are.
  size_t first = 0;
  int alike = 1;
};

// One rank's work in a stage. Each box is given by all its starts, then all its stops.
struct StageBoxes {
  using Boxes = std::vector<std::vector<int64_t>>;
  using Messages = std::vector<std::pair<int, Boxes>>;

  Boxes fills;              // boxes of the output to fill with a constant
  Boxes move_sources;       // boxes of the input to copy
  Boxes move_destinations;  // boxes of the output to copy to
  Messages sends;           // boxes of the input
  Messages receives;        // boxes of the output to overwrite
  // Contributions to add to boxes of the output, in this order. Peer -1 is this rank, which
  // contributes the boxes `own_sources` of its input.
  Messages sums;
  Boxes own_sources;
  // Boxes of the output to send, or to receive, once the sums are complete.
  Messages relays;
  Messages relayed;
};

struct BoundStage {
  // starts_with_copy: the first contribution overwrites. same_cells: all contributions go to the
  // same boxes. accumulates: contributions are added to the output's values.
  BoundStage(Dtype dtype, const std::vector<int64_t>& input_strides,
             const std::vector<int64_t>& output_strides, int64_t output_items, double fill,
             bool starts_with_copy, bool same_cells, bool accumulates, const StageBoxes& boxes);

  Dtype dtype;
  int64_t output_items;
  double fill;
  bool starts_with_copy;
  bool same_cells;
  bool accumulates;
  bool sums_widened;  // 16-bit sums are kept in float32 and rounded once
  std::vector<BoxView> fills;
  std::vector<BoxView> move_sources;
  std::vector<BoxView> move_destinations;
  std::vector<BoundMessage> sends;
  std::vector<BoundMessage> receives;
  std::vector<BoundMessage> sums;
  std::vector<BoxView> own_sources;
  std::vector<BoundMessage> relays;
  std::vector<BoundMessage> relayed;
};

struct StageCall {
  const BoundStage* stage;
  const char* input;
  char* output;
};

// Stages that run together, with all their messages in flight at once. All ranks start them with
// equal signatures and in the same order. All arguments must live until the exchange has been
// waited for.
class Exchange {
 public:
  Exchange(HostCommunicator& communicator, const Signature& signature,
           const std::vector<StageCall>& calls);
  ~Exchange() { end(); }
  // Without a preceding wait() this makes the communicator unusable. Blocks while a thread is
  // inside it.
  void end();
  Exchange(const Exchange&) = delete;

  // Wait for call number `i`, or for all calls.
  void wait(size_t i);
  void wait();

 private:
  struct BoundCall {
    StageCall stage_call;
    char* target = nullptr;
    std::vector<float> sums;
    std::vector<Transfer*> transfers;
    const Transfer* last_sum = nullptr;
    bool complete = false;
  };

  void post_all(const std::vector<StageCall>& calls);
  void move_in_turns(const StageCall& call, char* target);
  void post_sends(BoundCall& call, const std::vector<BoundMessage>& messages, char* tensor,
                  const Transfer* after);
  void post_sums(BoundCall& call);
  Transfer& add(BoundCall& call, Transfer::Kind kind, const BoundMessage& message, char* tensor);

  HostCommunicator& communicator_;
  const Signature& signature_;
  std::vector<BoundCall> calls_;
  std::vector<Transfer> transfers_;
  std::list<SharedPacking> packings_;
};

// Run stages together.
void run_stages(HostCommunicator& communicator, const Signature& signature,
                const std::vector<StageCall>& calls);

// Run a stage that exchanges no messages.
void run_local_stage(const StageCall& call);

}  // namespace gpudist
