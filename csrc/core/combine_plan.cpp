#include "core/combine_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "core/errors.h"

namespace gpudist {

namespace {

constexpr int64_t kGranule = CombineTile::kGranule, kTileRows = CombineTile::kRows;

int64_t ceil_divide(int64_t number, int64_t divisor) {
  return (number + divisor - 1) / divisor;
}

int64_t lowest_bit(int64_t bits) {
  return bits & -bits;
}

// A sum of complex numbers consists of the sums of their two parts.
Dtype real_dtype(Dtype dtype) {
  if (dtype == Dtype::kComplex64) return Dtype::kFloat32;
  if (dtype == Dtype::kComplex128) return Dtype::kFloat64;
  return dtype;
}

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Dims with more than one cell, sorted by the strides of the destination, so that neighbours in
// memory are written together.
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
      throw TransportError("the strides of a view and its box differ in the number of dims");
    }
    if (std::any_of(cells.strides.begin(), cells.strides.end(), [](auto s) { return s < 0; })) {
      throw TransportError("a stride is negative");
    }
  }
  if (box.views.empty() || (box.already_there && box.views.size() > 1)) {
    throw TransportError(
        "a box needs one destination, and no summands if it already has its values");
  }
  if (box.views.size() > std::numeric_limits<int16_t>::max()) {
    throw TransportError("a cell is the sum of more than 32766 cells");
  }
  if (box.views.size() > 2 && dtype == Dtype::kBool) throw TransportError("bool has no sum");
}

}  // namespace

int64_t CombinePlan::Rows::bytes() const {
  return product(shape) * row_bytes;
}

CombinePlan::CombinePlan(Dtype dtype, double fill, const std::vector<CombineBox>& boxes,
                         int64_t most_bytes)
    : dtype_(dtype), real_dtype_(real_dtype(dtype)), fill_(fill), most_bytes_(most_bytes) {
  for (const CombineBox& box : boxes) {
    check_box(box, dtype);
    if (product(box.shape) > 0) boxes_.push_back(rows_of(box, item_bytes(dtype)));
  }
}

CombinePlan::Rows CombinePlan::rows_of(const CombineBox& box, int64_t item_bytes) {
  Rows rows{static_cast<int>(box.views.size()) - 1, item_bytes, 0, {}, {}};
  if (box.already_there) rows.summands = CombineJob::kAlreadyThere;
  for (const CombineCells& cells : box.views) {
    rows.views.push_back({cells.buffer, cells.offset * item_bytes, {}});
  }
  const auto in_all_views = [&](auto holds) {
    for (size_t v = 0; v < box.views.size(); ++v) {
      if (!holds(rows.views[v].strides, box.views[v].strides)) return false;
    }
    return true;
  };
  for (size_t d : order_of_dims(box)) {
    const bool continues = !rows.shape.empty() && in_all_views([&](auto& outer, auto& strides) {
      return outer.back() == box.shape[d] * strides[d] * item_bytes;
    });
    if (!continues) {
      rows.shape.push_back(1);
      for (CombineCells& cells : rows.views) cells.strides.push_back(0);
    }
    rows.shape.back() *= box.shape[d];
    for (size_t v = 0; v < box.views.size(); ++v) {
      rows.views[v].strides.back() = box.views[v].strides[d] * item_bytes;
    }
  }
  const bool is_contiguous = !rows.shape.empty() && in_all_views([&](auto& strides, auto&) {
    return strides.back() == item_bytes;
  });
  if (is_contiguous) {
    rows.row_bytes *= rows.shape.back();
    rows.shape.pop_back();
    for (CombineCells& cells : rows.views) cells.strides.pop_back();
  }
  return rows;
}

CombineTable CombinePlan::table(int alignment, uint32_t group_blocks) const {
  CombineTable table;
  for (const Rows& rows : boxes_) append(rows, alignment, table);
  place_blocks(table, group_blocks);
  return table;
}

// Give each job its blocks. Jobs that have a block in each group come first.
void CombinePlan::place_blocks(CombineTable& table, uint32_t group_blocks) {
  uint32_t most = 0;
  for (const CombineJob& job : table.jobs) most = std::max(most, job.blocks);
  const uint32_t groups = most / group_blocks;
  const auto grouped_end =
      std::stable_partition(table.jobs.begin(), table.jobs.end(),
                            [&](const CombineJob& job) { return job.blocks >= groups; });
  const auto grouped_jobs = static_cast<uint32_t>(grouped_end - table.jobs.begin());
  if (groups > 1 && grouped_jobs > 1) table.grouped_jobs = grouped_jobs;
  int64_t blocks = 0;
  for (uint32_t j = 0; j < table.grouped_jobs; ++j) {
    CombineJob& job = table.jobs[j];
    job.first_block = static_cast<uint32_t>(blocks);
    job.group_blocks = static_cast<uint32_t>(ceil_divide(job.blocks, groups));
    blocks += job.group_blocks;
  }
  if (blocks > 0) table.group = Divisor::of(blocks);
  blocks *= groups;
  table.grouped_blocks = static_cast<uint32_t>(blocks);
  for (size_t j = table.grouped_jobs; j < table.jobs.size(); ++j) {
    table.jobs[j].first_block = static_cast<uint32_t>(blocks);
    blocks += table.jobs[j].blocks;
    if (blocks > std::numeric_limits<int32_t>::max()) throw TransportError("a stage is too large");
  }
  table.blocks = static_cast<uint32_t>(blocks);
}

int64_t CombinePlan::unit_of(const Rows& rows, int alignment) const {
  int64_t bits = kGranule | alignment | rows.row_bytes | rows.line_bytes;
  for (const CombineCells& cells : rows.views) {
    bits |= cells.offset;
    for (int64_t stride : cells.strides) bits |= stride;
  }
  // An item that is added may not span two granules.
  if (rows.summands > 1 && lowest_bit(bits) < item_bytes(real_dtype_)) {
    throw TransportError("a tensor's items are not aligned");
  }
  return lowest_bit(bits);
}

void CombinePlan::append(const Rows& box, int alignment, CombineTable& table) const {
  if (box.bytes() > most_bytes_) {
    for (const Rows& half : halves(box)) append(half, alignment, table);
    return;
  }
  const Rows rows = cut(box);
  const size_t last = rows.shape.size() - 1;
  const int64_t line_tiles = ceil_divide(rows.shape[last], kTileRows);
  // Rows of a tile are adjacent, except short ones: adjacent short rows belong to adjacent threads.
  constexpr int64_t kShort = 64;
  const int64_t to_next_tile = rows.row_bytes < kShort ? 1 : kTileRows;
  const int64_t to_next_row = rows.row_bytes < kShort ? line_tiles : 1;
  // Starts of rows of the destination, modulo a granule, differ by multiples of `unit`.
  int64_t unit = kGranule | alignment;
  for (int64_t stride : rows.views[0].strides) unit |= stride;
  unit = lowest_bit(unit);
  const int64_t latest_begin = rows.views[0].offset % unit + kGranule - unit;
  const int64_t columns = ceil_divide(latest_begin + rows.row_bytes, kGranule);

  CombineJob job{};
  job.first_view = static_cast<uint32_t>(table.views.size());
  job.row_bytes = static_cast<int32_t>(rows.row_bytes);
  job.line_bytes = static_cast<int32_t>(rows.line_bytes);
  job.tile_bytes = static_cast<int32_t>(to_next_tile * rows.row_bytes);
  job.step_bytes = static_cast<int32_t>(to_next_row * rows.row_bytes);
  job.summands = static_cast<int16_t>(rows.summands);
  job.dims = static_cast<uint8_t>(last);
  job.unit = static_cast<uint8_t>(unit_of(rows, alignment));
  job.columns = Divisor::of(columns);
  job.line = Divisor::of(line_tiles);
  int64_t tiles = columns * line_tiles;
  for (size_t d = 0; d < last; ++d) {
    job.shape[d] = Divisor::of(rows.shape[d]);
    tiles *= rows.shape[d];
  }
  job.tiles = static_cast<uint32_t>(tiles);
  const bool is_there = rows.summands == CombineJob::kAlreadyThere;
  job.blocks = is_there ? 1 : static_cast<uint32_t>(ceil_divide(tiles, CombineArguments::kThreads));
  table.jobs.push_back(job);
  for (const CombineCells& cells : rows.views) {
    CombineView view{};
    view.buffer = cells.buffer;
    view.offset = cells.offset;
    view.stop = cells.offset + rows.line_bytes;
    for (size_t d = 0; d <= last; ++d) view.stop += (rows.shape[d] - 1) * cells.strides[d];
    view.stop -= (rows.shape[last] - 1) * rows.row_bytes;
    view.step = to_next_row * cells.strides[last];
    // Of words, a row shorter than a granule is read cell by cell: a granule beside it may be in
    // memory that nothing else reads.
    const bool is_short = rows.row_bytes < kGranule && job.unit >= 4;
    view.reach = is_short ? view.stop + 1 : (kTileRows - 1) * view.step + 2 * kGranule;
    view.tile_stride = to_next_tile * cells.strides[last];
    std::copy_n(cells.strides.begin(), last, view.stride);
    table.views.push_back(view);
  }
}

// Split a box in two along its outermost dim; a single row is split at a multiple of a granule.
std::array<CombinePlan::Rows, 2> CombinePlan::halves(const Rows& rows) {
  std::array<Rows, 2> halves{rows, rows};
  const auto outermost =
      std::find_if(rows.shape.begin(), rows.shape.end(), [](int64_t extent) { return extent > 1; });
  if (outermost == rows.shape.end()) {
    const int64_t first = rows.row_bytes / kGranule / 2 * kGranule;
    halves[0].row_bytes = first;
    halves[1].row_bytes -= first;
    for (CombineCells& cells : halves[1].views) cells.offset += first;
    return halves;
  }
  const size_t d = outermost - rows.shape.begin();
  const int64_t first = rows.shape[d] / 2;
  halves[0].shape[d] = first;
  halves[1].shape[d] -= first;
  for (CombineCells& cells : halves[1].views) cells.offset += first * cells.strides[d];
  return halves;
}

// Split long rows into shorter ones if a line has too few rows for a tile.
CombinePlan::Rows CombinePlan::cut(Rows rows) {
  constexpr int64_t kEnoughRows = 16, kShortest = 256, kLongest = 4096;
  if (rows.shape.empty()) {
    rows.shape.push_back(1);
    for (CombineCells& cells : rows.views) cells.strides.push_back(0);
  }
  const int64_t count = rows.shape.back();
  rows.line_bytes = count * rows.row_bytes;
  if (count % kTileRows == 0 || count >= kEnoughRows || rows.row_bytes < kTileRows * kShortest) {
    return rows;
  }
  rows.line_bytes = rows.row_bytes;
  const int64_t parts = kTileRows * ceil_divide(rows.line_bytes, kTileRows * kLongest);
  rows.row_bytes = ceil_divide(ceil_divide(rows.line_bytes, parts), kGranule) * kGranule;
  if (count > 1) {
    rows.shape.push_back(1);
    for (CombineCells& cells : rows.views) cells.strides.push_back(0);
  }
  rows.shape.back() = ceil_divide(rows.line_bytes, rows.row_bytes);
  for (CombineCells& cells : rows.views) cells.strides.back() = rows.row_bytes;
  return rows;
}

CombineArguments CombinePlan::arguments(const CombineTable& table) const {
  CombineArguments arguments{};
  arguments.jobs = table.jobs.data();
  arguments.views = table.views.data();
  arguments.job_count = static_cast<uint32_t>(table.jobs.size());
  arguments.blocks = table.blocks;
  arguments.grouped_jobs = table.grouped_jobs;
  arguments.grouped_blocks = table.grouped_blocks;
  arguments.group = table.group;
  arguments.dtype = real_dtype_;
  BoxView constant;
  constant.rows = 1;
  constant.row_bytes = sizeof(arguments.fill);
  fill(reinterpret_cast<char*>(arguments.fill), constant, dtype_, fill_);
  return arguments;
}

}  // namespace gpudist
