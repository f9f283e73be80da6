// A stage of a plan, bound to shapes, strides and a dtype: one call packs, exchanges, unpacks and
// fills.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "host_communicator.h"
#include "packing.h"

namespace gpudist {

struct BoundMessage {
  int peer;
  std::vector<BoxView> boxes;
  int64_t bytes;
};

// Where a tensor's boxes lie.
struct TensorLayout {
  std::vector<int64_t> strides;  // in items
  int64_t item_bytes;

  std::vector<BoxView> views(const std::vector<std::vector<int64_t>>& boxes) const;
};

struct BoundStage {
  using Boxes = std::vector<std::vector<int64_t>>;  // each: all starts, then all stops
  using Messages = std::vector<std::pair<int, Boxes>>;

  // `receives` are in the order in which they are added; the own moves come before number
  // `own_place`.
  BoundStage(Dtype dtype, std::vector<int64_t> input_strides, std::vector<int64_t> output_strides,
             int64_t output_items, double fill, bool clears, bool adds, const Boxes& move_sources,
             const Boxes& move_destinations, const Messages& sends, const Messages& receives,
             int own_place);

  Dtype dtype;
  int64_t output_items;
  double fill;
  bool clears;  // some output cell is written by nothing, or added to
  bool adds;
  std::vector<BoxView> move_sources;
  std::vector<BoxView> move_destinations;
  std::vector<BoundMessage> sends;
  std::vector<BoundMessage> receives;
  int own_place;
};

struct StageCall {
  const BoundStage* stage;
  const char* input;
  char* output;
};

// Carry out stages together, all their messages in flight at once; ranks take part with equal
// signatures.
void run_stages(HostCommunicator& communicator, const Signature& signature,
                const std::vector<StageCall>& calls);

// Carry out a stage that exchanges nothing.
void run_local_stage(const StageCall& call);

}  // namespace gpudist
