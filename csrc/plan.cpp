#include "plan.h"

#include <deque>
#include <map>
#include <memory>

#include "check.h"

namespace gpudist {

std::vector<BoxView> TensorLayout::views(const std::vector<std::vector<int64_t>>& boxes) const {
  std::vector<BoxView> views;
  views.reserve(boxes.size());
  const int dims = static_cast<int>(strides.size());
  if (dims > kMaxDims) throw TransportError("a tensor has more than 8 dims");
  for (const auto& box : boxes) {
    if (box.size() != 2 * strides.size()) throw TransportError("a box has not the tensor's dims");
    views.push_back(make_box_view(dims, box.data(), box.data() + dims, strides.data(), item_bytes));
  }
  return views;
}

namespace {

std::vector<BoundMessage> bind(const BoundStage::Messages& messages, const TensorLayout& tensor,
                               int64_t wire_item_bytes) {
  std::vector<BoundMessage> bound;
  for (const auto& [peer, boxes] : messages) {
    BoundMessage message{peer, tensor.views(boxes), 0};
    for (const BoxView& box : message.boxes) {
      message.bytes += box.bytes() / tensor.item_bytes * wire_item_bytes;
    }
    bound.push_back(std::move(message));
  }
  return bound;
}

}  // namespace

BoundStage::BoundStage(Dtype dtype, std::vector<int64_t> input_strides,
                       std::vector<int64_t> output_strides, int64_t output_items, double fill,
                       bool clears, bool adds, const Boxes& move_sources,
                       const Boxes& move_destinations, const Messages& sends,
                       const Messages& receives, int own_place)
    : dtype(dtype),
      output_items(output_items),
      fill(fill),
      clears(clears),
      adds(adds),
      own_place(own_place) {
  const int64_t item = gpudist::item_bytes(dtype);
  const TensorLayout input{std::move(input_strides), item};
  const TensorLayout output{std::move(output_strides),
                            adds ? gpudist::item_bytes(sum_dtype(dtype)) : item};
  this->move_sources = input.views(move_sources);
  this->move_destinations = output.views(move_destinations);
  this->sends = bind(sends, input, item);
  this->receives = bind(receives, output, item);
}

namespace {

// The output of a call while it is being made: 16-bit sums are kept in float32.
struct Output {
  explicit Output(const StageCall& call) : call(call), target(call.output) {
    const BoundStage& stage = *call.stage;
    if (stage.adds && is_narrow(stage.dtype)) {
      sums.resize(stage.output_items);
      target = reinterpret_cast<char*>(sums.data());
    } else if (stage.clears) {
      gpudist::fill(target, stage.output_items, stage.dtype, stage.fill);
    }
  }

  void move_own() const {
    const BoundStage& stage = *call.stage;
    if (stage.adds) {
      add_boxes(call.input, stage.move_sources, target, stage.move_destinations, stage.dtype);
    } else {
      copy_boxes(call.input, stage.move_sources, target, stage.move_destinations);
    }
  }

  void finish() const {
    if (!sums.empty()) narrow(sums.data(), call.output, sums.size(), call.stage->dtype);
  }

  StageCall call;
  char* target;
  std::vector<float> sums;
};

}  // namespace

void run_local_stage(const StageCall& call) {
  const Output output(call);
  output.move_own();
  output.finish();
}

void run_stages(HostCommunicator& communicator, const Signature& signature,
                const std::vector<StageCall>& calls) {
  const auto locked = communicator.lock();
  communicator.begin(signature);
  std::deque<Output> outputs;
  std::deque<Transfer> transfers;
  const auto post = [&](Transfer transfer) {
    transfer.signature = &signature;
    transfers.push_back(std::move(transfer));
    communicator.post(&transfers.back());
    return &transfers.back();
  };
  for (const StageCall& call : calls) {
    for (const BoundMessage& message : call.stage->sends) {
      Transfer send;
      send.kind = Transfer::Kind::kSend;
      send.peer = message.peer;
      send.bytes = message.bytes;
      // Sends only read.
      send.tensor = const_cast<char*>(call.input);
      send.boxes = &message.boxes;
      post(std::move(send));
    }
  }
  // Stages may share an output: what is added to it comes in the order of the calls.
  std::map<const char*, const Transfer*> last_into;
  for (const StageCall& call : calls) {
    const BoundStage& stage = *call.stage;
    outputs.emplace_back(call);
    const Output& output = outputs.back();
    const Transfer*& last = last_into[output.target];
    for (int place = 0; place <= static_cast<int>(stage.receives.size()); ++place) {
      if (place == stage.own_place && !stage.move_sources.empty()) {
        Transfer own;
        own.kind = Transfer::Kind::kLocal;
        own.local = [&output] { output.move_own(); };
        own.after = last;
        last = post(std::move(own));
        if (!stage.adds) last = nullptr;
      }
      if (place == static_cast<int>(stage.receives.size())) break;
      const BoundMessage& message = stage.receives[place];
      Transfer receive;
      receive.kind = Transfer::Kind::kReceive;
      receive.peer = message.peer;
      receive.bytes = message.bytes;
      receive.tensor = output.target;
      receive.boxes = &message.boxes;
      receive.adds = stage.adds;
      receive.dtype = stage.dtype;
      receive.after = last;
      const Transfer* posted = post(std::move(receive));
      if (stage.adds) last = posted;
    }
  }
  std::vector<Transfer*> all;
  all.reserve(transfers.size());
  for (Transfer& transfer : transfers) all.push_back(&transfer);
  communicator.wait(all);
  for (const Output& output : outputs) output.finish();
}

}  // namespace gpudist
