#include "host/plan.h"

#include <algorithm>

#include "core/errors.h"
#include "core/recycling.h"
#include "host/mailbox.h"

namespace gpudist {

namespace {

using Boxes = StageBoxes::Boxes;
using Kind = Transfer::Kind;

// Bytes to move before more messages are packed.
constexpr int64_t kMovedBytes = 256 * 1024;

// Address and strides of the tensor that boxes refer to.
struct TensorView {
  const std::vector<int64_t>& strides;  // in items
  int64_t item_bytes;

  std::vector<BoxView> views(const Boxes& boxes) const {
    const int dims = static_cast<int>(strides.size());
    if (dims > kMaxDims) throw TransportError("a tensor has more than 8 dims");
    std::vector<BoxView> views;
    views.reserve(boxes.size());
    for (const auto& box : boxes) {
      if (box.size() != 2 * strides.size()) {
        throw TransportError("a box has " + std::to_string(box.size() / 2) +
                             " dims, the tensor has " + std::to_string(dims));
      }
      views.push_back(
          make_box_view(dims, box.data(), box.data() + dims, strides.data(), item_bytes));
    }
    return views;
  }

  std::vector<BoundMessage> bind(const StageBoxes::Messages& messages, int64_t wire_bytes) const {
    std::vector<BoundMessage> bound;
    bound.reserve(messages.size());
    for (const auto& [peer, boxes] : messages) {
      BoundMessage message{peer, views(boxes), 0, bound.size(), 1};
      for (const BoxView& box : message.boxes) {
        message.bytes += box.bytes() / item_bytes * wire_bytes;
      }
      bound.push_back(std::move(message));
    }
    for (size_t i = 0; i < bound.size(); ++i) {
      const auto is_alike = [&](const auto& other) { return other.second == messages[i].second; };
      const auto first = std::find_if(messages.begin(), messages.end(), is_alike);
      bound[i].first = static_cast<size_t>(first - messages.begin());
      bound[i].alike = static_cast<int>(std::count_if(messages.begin(), messages.end(), is_alike));
    }
    return bound;
  }
};

}  // namespace

BoundStage::BoundStage(Dtype dtype, const std::vector<int64_t>& input_strides,
                       const std::vector<int64_t>& output_strides, int64_t output_items,
                       double fill, bool starts_with_copy, bool same_cells, bool accumulates,
                       const StageBoxes& boxes)
    : dtype(dtype),
      output_items(output_items),
      fill(fill),
      starts_with_copy(starts_with_copy),
      same_cells(same_cells),
      accumulates(accumulates),
      sums_widened(is_narrow(dtype) && !boxes.sums.empty()) {
  const int64_t item = item_bytes(dtype);
  const TensorView input{input_strides, item};
  const TensorView output{output_strides, sums_widened ? item_bytes(sum_dtype(dtype)) : item};
  if (sums_widened &&
      (!boxes.receives.empty() || !boxes.move_sources.empty() || starts_with_copy)) {
    throw TransportError("sums in float32 start from zero");
  }
  fills = output.views(boxes.fills);
  move_sources = input.views(boxes.move_sources);
  move_destinations = output.views(boxes.move_destinations);
  sends = input.bind(boxes.sends, item);
  receives = output.bind(boxes.receives, item);
  sums = output.bind(boxes.sums, item);
  own_sources = input.views(boxes.own_sources);
  relays = output.bind(boxes.relays, item);
  relayed = output.bind(boxes.relayed, item);
}

namespace {

// Return where to sum: the output itself, or `widened`.
char* begin_output(const StageCall& call, std::vector<float>& widened) {
  const BoundStage& stage = *call.stage;
  if (!stage.sums_widened) return call.output;
  widened.resize(stage.output_items);
  if (stage.accumulates) widen(call.output, widened.data(), stage.output_items, stage.dtype);
  return reinterpret_cast<char*>(widened.data());
}

void fill_boxes(const StageCall& call, char* target) {
  const BoundStage& stage = *call.stage;
  if (stage.sums_widened) return;
  for (const BoxView& box : stage.fills) fill(target, box, stage.dtype, stage.fill);
}

void move_boxes(const StageCall& call, char* target) {
  copy_boxes(call.input, call.stage->move_sources, target, call.stage->move_destinations);
}

// The system fills a new page in the cache when it is first written.
bool writes_past_cache(int64_t bytes, const char* target) {
  return bytes >= kPastCacheBytes && !recycling_pool().is_new(target);
}

int64_t bytes_of(const std::vector<BoxView>& boxes) {
  int64_t bytes = 0;
  for (const BoxView& box : boxes) bytes += box.bytes();
  return bytes;
}

void end_output(const StageCall& call, const std::vector<float>& widened) {
  const BoundStage& stage = *call.stage;
  if (stage.sums_widened) narrow(widened.data(), call.output, stage.output_items, stage.dtype);
}

size_t transfers_in(const BoundStage& stage) {
  return stage.sends.size() + stage.receives.size() + stage.sums.size() + stage.relays.size() +
         stage.relayed.size();
}

}  // namespace

Exchange::Exchange(HostCommunicator& communicator, const Signature& signature,
                   const std::vector<StageCall>& calls)
    : communicator_(communicator), signature_(signature), calls_(calls.size()) {
  const auto locked = communicator.enter();
  communicator.begin(signature);
  try {
    post_all(calls);
  } catch (...) {
    communicator.abandon();
    throw;
  }
}

void Exchange::end() {
  bool is_complete = true;
  for (BoundCall& call : calls_) {
    is_complete = is_complete && call.complete;
    call.complete = true;
  }
  if (!is_complete) communicator_.abandon();
}

void Exchange::post_all(const std::vector<StageCall>& calls) {
  size_t count = 0;
  for (const StageCall& call : calls) count += transfers_in(*call.stage);
  transfers_.reserve(count);  // reserved, because transfers are referred to by address
  for (size_t i = 0; i < calls.size(); ++i) {
    calls_[i].stage_call = calls[i];
    calls_[i].transfers.reserve(transfers_in(*calls[i].stage));
    char* const input = const_cast<char*>(calls[i].input);  // only read
    post_sends(calls_[i], calls[i].stage->sends, input, nullptr);
  }
  // Start the messages that peers wait for before doing other work.
  communicator_.progress();
  for (BoundCall& call : calls_) {
    call.target = begin_output(call.stage_call, call.sums);
    fill_boxes(call.stage_call, call.target);
    for (const BoundMessage& message : call.stage_call.stage->receives) {
      Transfer& receive = add(call, Kind::kReceive, message, call.target);
      receive.past_cache = writes_past_cache(message.bytes, call.target);
      communicator_.post(&receive);
    }
    move_in_turns(call.stage_call, call.target);
    post_sums(call);
  }
  for (BoundCall& call : calls_) {
    const BoundStage& stage = *call.stage_call.stage;
    const Transfer* sum = stage.relays.empty() ? nullptr : call.transfers.back();
    post_sends(call, stage.relays, call.target, sum);
    for (const BoundMessage& message : stage.relayed) {
      communicator_.post(&add(call, Kind::kReceive, message, call.target));
    }
  }
}

void Exchange::post_sends(BoundCall& call, const std::vector<BoundMessage>& messages, char* tensor,
                          const Transfer* after) {
  const size_t first = call.transfers.size();
  for (size_t i = 0; i < messages.size(); ++i) {
    const BoundMessage& message = messages[i];
    Transfer& send = add(call, Kind::kSend, message, tensor);
    send.after = after;
    if (message.alike > 1 && message.bytes > kSlotBytes) {
      if (message.first == i) packings_.push_back({message.alike, {}});
      send.shared =
          message.first == i ? &packings_.back() : call.transfers[first + message.first]->shared;
    }
    communicator_.post(&send);
  }
}

// Messages make progress between parts of a large move: peers do not wait, and cells that are both
// sent and moved are in the cache.
void Exchange::move_in_turns(const StageCall& call, char* target) {
  const BoundStage& stage = *call.stage;
  const int64_t total = bytes_of(stage.move_sources);
  if (total <= kMovedBytes) return move_boxes(call, target);
  const bool past_cache = writes_past_cache(total, target);
  BoxStream from(&stage.move_sources), to(&stage.move_destinations);
  for (int64_t moved = 0; moved < total; moved += kMovedBytes) {
    const int64_t bytes = std::min(kMovedBytes, total - moved);
    copy_cells(call.input, from, target, to, bytes, past_cache);
    communicator_.progress();
  }
}

void Exchange::post_sums(BoundCall& call) {
  const BoundStage& stage = *call.stage_call.stage;
  // Calls may share an output. Additions to it happen in their order.
  const Transfer* last = nullptr;
  for (const BoundCall& before : calls_) {
    if (&before == &call) break;
    if (before.target == call.target && before.last_sum != nullptr) last = before.last_sum;
  }
  const Transfer* const shared = last;
  for (size_t i = 0; i < stage.sums.size(); ++i) {
    // If one of the first two summands is this rank's own, both are added in one pass over the
    // cells.
    const bool joins_own = stage.starts_with_copy && stage.same_cells && i == 0 &&
                           stage.sums.size() > 1 &&
                           (stage.sums[0].peer < 0 || stage.sums[1].peer < 0);
    if (joins_own && stage.sums[0].peer < 0) ++i;
    const BoundMessage& message = stage.sums[i];
    const Kind kind = message.peer < 0 ? Kind::kOwn : Kind::kReceive;
    Transfer& sum = add(call, kind, message, call.target);
    sum.source = call.stage_call.input;
    sum.source_boxes = &stage.own_sources;
    if (joins_own) sum.own = call.stage_call.input;
    sum.adds = !joins_own && (last != nullptr || !stage.starts_with_copy);
    sum.after = last;
    sum.streams = stage.same_cells && (last == nullptr || last != shared);
    communicator_.post(&sum);
    last = &sum;
    if (joins_own && stage.sums[0].peer >= 0) ++i;
  }
  call.last_sum = last;
}

Transfer& Exchange::add(BoundCall& call, Kind kind, const BoundMessage& message, char* tensor) {
  transfers_.emplace_back();
  Transfer& transfer = transfers_.back();
  transfer.kind = kind;
  transfer.peer = message.peer;
  transfer.bytes = message.bytes;
  transfer.tensor = tensor;
  transfer.boxes = &message.boxes;
  transfer.dtype = call.stage_call.stage->dtype;
  transfer.signature = &signature_;
  call.transfers.push_back(&transfer);
  return transfer;
}

void Exchange::wait(size_t i) {
  BoundCall& call = calls_.at(i);
  if (call.complete) return;
  const auto locked = communicator_.enter();
  try {
    communicator_.wait(call.transfers);
  } catch (...) {
    for (BoundCall& failed : calls_) failed.complete = true;
    throw;
  }
  end_output(call.stage_call, call.sums);
  call.complete = true;
}

void Exchange::wait() {
  for (size_t i = 0; i < calls_.size(); ++i) wait(i);
}

void run_stages(HostCommunicator& communicator, const Signature& signature,
                const std::vector<StageCall>& calls) {
  Exchange(communicator, signature, calls).wait();
}

void run_local_stage(const StageCall& call) {
  const BoundStage& stage = *call.stage;
  std::vector<float> widened;
  char* target = begin_output(call, widened);
  fill_boxes(call, target);
  move_boxes(call, target);
  for (const BoundMessage& own : stage.sums) {
    BoxStream from(&stage.own_sources), to(&own.boxes);
    if (stage.starts_with_copy) {
      copy_cells(call.input, from, target, to, own.bytes, false);
    } else {
      add_cells(call.input, from, target, to, own.bytes, stage.dtype);
    }
  }
  end_output(call, widened);
}

}  // namespace gpudist
