#include "combine_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "check.h"

namespace gpudist {

namespace {

constexpr int64_t kWidestLane = 16;

Divisor make_divisor(int64_t value) {
  Divisor divisor;
  divisor.value = static_cast<uint32_t>(value);
  if (value == 1) return divisor;
  while ((int64_t{2} << divisor.shift) < value) ++divisor.shift;
  const uint64_t power = uint64_t{1} << (32 + divisor.shift);
  divisor.multiplier = static_cast<uint32_t>((power + divisor.value - 1) / divisor.value);
  return divisor;
}

// Sums of complex numbers are sums of their two parts.
Dtype real_dtype(Dtype dtype) {
  if (dtype == Dtype::kComplex64) return Dtype::kFloat32;
  if (dtype == Dtype::kComplex128) return Dtype::kFloat64;
  return dtype;
}

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Dims of more than one cell, in the order in which the destination lies in memory: neighbours
// there are written together.
std::vector<size_t> order_of_dims(const CombineBox& box) {
  std::vector<size_t> order;
  for (size_t d = 0; d < box.shape.size(); ++d) {
    if (box.shape[d] > 1) order.push_back(d);
  }
  const std::vector<int64_t>& strides = box.views[0].strides;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return strides[a] > strides[b]; });
  return order;
}

void check_box(const CombineBox& box, Dtype dtype) {
  if (box.shape.size() > kMaxDims) throw TransportError("a tensor has more than 8 dims");
  for (const CombineCells& cells : box.views) {
    if (cells.strides.size() != box.shape.size()) {
      throw TransportError("cells have not the dims of their box");
    }
  }
  if (box.views.empty() || (box.already_there && box.views.size() > 1)) {
    throw TransportError("a box is one destination, and summands if it has not its values");
  }
  if (box.views.size() > std::numeric_limits<int16_t>::max()) {
    throw TransportError("a cell is the sum of more than 32766 others");
  }
  if (box.views.size() > 2 && dtype == Dtype::kBool) throw TransportError("no sum of bool");
}

}  // namespace

int64_t CombinePlan::Rows::bytes() const {
  return product(shape) * row_bytes;
}

CombinePlan::CombinePlan(Dtype dtype, double fill, const std::vector<CombineBox>& boxes,
                         int64_t most_lanes)
    : dtype_(dtype), real_dtype_(real_dtype(dtype)), fill_(fill), most_lanes_(most_lanes) {
  for (const CombineBox& box : boxes) {
    check_box(box, dtype);
    if (product(box.shape) > 0) boxes_.push_back(rows_of(box, item_bytes(dtype)));
  }
}

CombinePlan::Rows CombinePlan::rows_of(const CombineBox& box, int64_t item_bytes) {
  Rows rows{static_cast<int>(box.views.size()) - 1, item_bytes, {}, {}};
  if (box.already_there) rows.summands = CombineJob::kAlreadyThere;
  for (const CombineCells& cells : box.views) {
    rows.views.push_back({cells.offset * item_bytes, {}, cells.buffer});
  }
  const auto in_all_views = [&](auto holds) {
    for (size_t v = 0; v < box.views.size(); ++v) {
      if (!holds(rows.views[v].stride, box.views[v].strides)) return false;
    }
    return true;
  };
  for (size_t d : order_of_dims(box)) {
    const size_t last = rows.shape.size() - 1;
    const bool continues = !rows.shape.empty() && in_all_views([&](auto& outer, auto& strides) {
      return outer[last] == box.shape[d] * strides[d] * item_bytes;
    });
    if (!continues) rows.shape.push_back(1);
    rows.shape.back() *= box.shape[d];
    for (size_t v = 0; v < box.views.size(); ++v) {
      rows.views[v].stride[rows.shape.size() - 1] = box.views[v].strides[d] * item_bytes;
    }
  }
  const bool contiguous = !rows.shape.empty() && in_all_views([&](auto& stride, auto&) {
    return stride[rows.shape.size() - 1] == item_bytes;
  });
  if (contiguous) {
    rows.row_bytes *= rows.shape.back();
    rows.shape.pop_back();
  }
  return rows;
}

int CombinePlan::lane_bytes(const Rows& rows, int alignment) const {
  int64_t bits = kWidestLane | alignment | rows.row_bytes;
  for (const CombineView& view : rows.views) {
    bits |= view.offset;
    for (size_t d = 0; d < rows.shape.size(); ++d) bits |= view.stride[d];
  }
  const int64_t widest = bits & -bits;
  if (rows.summands <= 1) return static_cast<int>(widest);
  const int64_t real_bytes = item_bytes(real_dtype_);
  if (widest < real_bytes) throw TransportError("a tensor's items are not aligned");
  return static_cast<int>(widest < kWidestLane ? real_bytes : kWidestLane);
}

CombineTable CombinePlan::table(int alignment) const {
  CombineTable table;
  for (const Rows& rows : boxes_) append(rows, lane_bytes(rows, alignment), table);
  return table;
}

void CombinePlan::append(const Rows& rows, int lane_bytes, CombineTable& table) const {
  const int64_t lanes = rows.bytes() / lane_bytes;
  if (lanes > most_lanes_) {
    for (const Rows& half : halves(rows)) append(half, lane_bytes, table);
    return;
  }
  CombineJob job{};
  job.lanes = static_cast<uint32_t>(lanes);
  job.first_block = table.blocks;
  job.first_view = static_cast<uint32_t>(table.views.size());
  job.summands = static_cast<int16_t>(rows.summands);
  job.lane_bytes = static_cast<uint8_t>(lane_bytes);
  job.dims = static_cast<uint8_t>(rows.shape.size());
  job.row_lanes = make_divisor(rows.row_bytes / lane_bytes);
  for (int d = 0; d < job.dims; ++d) job.shape[d] = make_divisor(rows.shape[d]);
  constexpr int64_t kLanes = CombineArguments::kLanesPerBlock;
  const int64_t blocks = table.blocks + (lanes + kLanes - 1) / kLanes;
  if (blocks > std::numeric_limits<int32_t>::max()) throw TransportError("a stage is too large");
  table.blocks = static_cast<uint32_t>(blocks);
  table.jobs.push_back(job);
  table.views.insert(table.views.end(), rows.views.begin(), rows.views.end());
}

// Cut in the outermost dim, or the only row where a lane and an item begin.
std::array<CombinePlan::Rows, 2> CombinePlan::halves(const Rows& rows) {
  std::array<Rows, 2> halves{rows, rows};
  const auto outermost =
      std::find_if(rows.shape.begin(), rows.shape.end(), [](int64_t extent) { return extent > 1; });
  if (outermost == rows.shape.end()) {
    const int64_t first = rows.row_bytes / kWidestLane / 2 * kWidestLane;
    halves[0].row_bytes = first;
    halves[1].row_bytes -= first;
    for (CombineView& view : halves[1].views) view.offset += first;
    return halves;
  }
  const size_t d = outermost - rows.shape.begin();
  const int64_t first = rows.shape[d] / 2;
  halves[0].shape[d] = first;
  halves[1].shape[d] -= first;
  for (CombineView& view : halves[1].views) view.offset += first * view.stride[d];
  return halves;
}

CombineArguments CombinePlan::arguments(const CombineTable& table) const {
  CombineArguments arguments{};
  arguments.jobs = table.jobs.data();
  arguments.views = table.views.data();
  arguments.job_count = static_cast<uint32_t>(table.jobs.size());
  arguments.blocks = table.blocks;
  arguments.dtype = real_dtype_;
  arguments.item_bytes = static_cast<uint32_t>(item_bytes(dtype_));
  BoxView constant;
  constant.rows = 1;
  constant.row_bytes = sizeof(arguments.fill);
  fill(reinterpret_cast<char*>(arguments.fill), constant, dtype_, fill_);
  return arguments;
}

}  // namespace gpudist
