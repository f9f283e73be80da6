// A stage of a plan, bound to shapes, strides and a dtype: one call packs, exchanges, unpacks and
// fills.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/packing.h"
#include "host/host_communicator.h"

namespace gpudist {

struct BoundMessage {
  int peer;  // -1: this rank
  std::vector<BoxView> boxes;
  int64_t bytes;
};

// What one rank does in a stage, in boxes: each all starts, then all stops.
struct StageBoxes {
  using Boxes = std::vector<std::vector<int64_t>>;
  using Messages = std::vector<std::pair<int, Boxes>>;

  Boxes fills;              // of the output: what nothing is copied to
  Boxes move_sources;       // of the input: what is copied
  Boxes move_destinations;  // to these of the output
  Messages sends;           // of the input
  Messages receives;        // of the output, which are overwritten
  // Of the output: contributions that are added, one after the other. Peer -1 is this rank, whose
  // boxes of the input are `own_sources`.
  Messages sums;
  Boxes own_sources;
  // When the sums are complete, these of the output are sent on, and those received.
  Messages relays;
  Messages relayed;
};

struct BoundStage {
  // starts_with_copy: the first sum overwrites. same_cells: all sums are of the same boxes.
  // accumulates: the output has values, to which is added.
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

// Stages on their way together, all their messages in flight at once. Ranks start them with equal
// signatures, in the same order. Whatever it is given must live until it has been waited for.
class Exchange {
 public:
  Exchange(HostCommunicator& communicator, const Signature& signature,
           const std::vector<StageCall>& calls);
  ~Exchange() { end(); }
  // One that was not waited for leaves the communicator unusable; waits for a thread inside it.
  void end();
  Exchange(const Exchange&) = delete;

  // Complete call number `i`, or all.
  void wait(size_t i);
  void wait();

 private:
  struct Call {
    StageCall stage_call;
    char* target = nullptr;
    std::vector<float> sums;
    std::vector<Transfer*> transfers;
    const Transfer* last_sum = nullptr;
    bool complete = false;
  };

  void post_all(const std::vector<StageCall>& calls);
  void post_sums(Call& call);
  Transfer& add(Call& call, Transfer::Kind kind, const BoundMessage& message, char* tensor);

  HostCommunicator& communicator_;
  const Signature& signature_;
  std::vector<Call> calls_;
  std::vector<Transfer> transfers_;
};

// Carry out stages together, all at once.
void run_stages(HostCommunicator& communicator, const Signature& signature,
                const std::vector<StageCall>& calls);

// Carry out a stage that exchanges nothing.
void run_local_stage(const StageCall& call);

}  // namespace gpudist
