#include "core/norm_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/errors.h"
#include "core/norm_body.h"

namespace gpudist {

namespace {

// Blocks of threads that run at once on a multiprocessor, and how often they follow each other: the
// more often, the smaller is the share of time in which only some multiprocessors work.
constexpr int64_t kBlocksAtOnce = 4, kTurns = 4;
constexpr int64_t kThreads = NormArguments::kThreads;
constexpr int64_t kWarp = 32;
constexpr int64_t kWide = 4;

int64_t divided_up(int64_t number, int64_t by) {
  return (number + by - 1) / by;
}

// The least power of two that is at least `number`, and at most `most`.
int64_t power_of_two(int64_t number, int64_t most) {
  int64_t power = 1;
  while (power < number && power < most) power *= 2;
  return power;
}

uint32_t number_of_blocks(int64_t blocks) {
  if (blocks > std::numeric_limits<int32_t>::max()) {
    throw TransportError("a normalization of " + std::to_string(blocks) +
                         " blocks of threads; a launch has at most 2^31 - 1");
  }
  return static_cast<uint32_t>(blocks);
}

// Divide `cells` into parts of whole tiles, at most `wanted`.
void divide(NormGrid& grid, int64_t cells, int64_t tile, int64_t wanted) {
  const int64_t tiles = std::max<int64_t>(1, divided_up(cells, tile));
  // A part has fewer cells than 32 bits can number.
  wanted = std::max(wanted, divided_up(cells, int64_t{1} << 30));
  grid.part_cells =
      static_cast<uint32_t>(divided_up(tiles, std::clamp<int64_t>(wanted, 1, tiles)) * tile);
  grid.parts = number_of_blocks(std::max<int64_t>(1, divided_up(cells, grid.part_cells)));
}

bool is_multiple(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Threads that share `partials` partial sums.
uint32_t lanes_for(int64_t partials) {
  return static_cast<uint32_t>(power_of_two(divided_up(partials, 2), kThreads));
}

int64_t blocks_of(int64_t results, uint32_t lanes) {
  return divided_up(results, kThreads / lanes);
}

}  // namespace

NormPlan::NormPlan(const NormShape& shape, uint32_t multiprocessors)
    : shape_(shape), least_blocks_(multiprocessors * kBlocksAtOnce * kTurns) {
  const bool is_float = shape.dtype == Dtype::kFloat32 || shape.dtype == Dtype::kFloat64;
  const bool is_widened = shape.result_dtype == Dtype::kFloat32 && is_narrow(shape.dtype);
  const bool is_known =
      is_widened || (shape.dtype == shape.result_dtype && (is_float || is_narrow(shape.dtype)));
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const bool has_cells = shape.outer >= 1 && shape.channels >= 1 && shape.cells >= 1;
  const bool fits = has_cells && shape.outer <= kMost / shape.channels &&
                    shape.groups <= kMost / shape.outer && shape.group_size <= kMost &&
                    shape.group_offset <= kMost &&
                    (shape.walk != NormWalk::kCells || shape.cells <= kMost);
  if (!is_known || !fits) {
    throw TransportError(
        "a normalization of more than 2^31 - 1 lines, statistics or parameters, "
        "of none, or of a dtype that the kernels do not have");
  }
}

int64_t NormPlan::statistics() const {
  return (shape_.shares_outer ? 1 : shape_.outer) * shape_.groups;
}

// A part is divided among threads in steps of `loads` groups of `width` cells.
NormGrid NormPlan::rows(int64_t width, int64_t loads) const {
  NormGrid grid;
  const int64_t lines = shape_.outer * shape_.channels;
  const int64_t groups = divided_up(shape_.cells, width);
  // A warp loads contiguous memory if the line is long enough.
  const int64_t lanes =
      std::max(power_of_two(divided_up(groups, loads), kThreads), power_of_two(groups, kWarp));
  const int64_t units = divided_up(lines, kThreads / lanes);
  grid.lanes = static_cast<uint32_t>(lanes);
  const int64_t wanted = lanes == kThreads ? divided_up(least_blocks_, units) : 1;
  divide(grid, shape_.cells, lanes * width * loads, wanted);
  grid.blocks = number_of_blocks(units * grid.parts);
  return grid;
}

NormGrid NormPlan::columns(int64_t outer, int64_t rows, int64_t columns, int64_t width,
                           int64_t loads, int64_t most_lanes) const {
  NormGrid grid;
  const int64_t groups = divided_up(columns, width), lanes = power_of_two(groups, most_lanes);
  grid.lanes = static_cast<uint32_t>(lanes);
  grid.tiles = number_of_blocks(divided_up(groups, lanes));
  divide(grid, rows, kThreads / lanes * loads, divided_up(least_blocks_, outer * grid.tiles));
  grid.blocks = number_of_blocks(outer * grid.tiles * grid.parts);
  return grid;
}

NormGrid NormPlan::grid(NormPass pass, bool is_wide) const {
  const auto [of_rows, of_columns, of_cells] =
      norming::loads_of(pass, shape_.dtype, shape_.result_dtype, is_wide);
  const int64_t width = is_wide ? kWide : 1;
  if (shape_.walk == NormWalk::kColumns) {
    return columns(shape_.outer, shape_.cells, shape_.channels, width, of_columns, kWarp);
  }
  if (shape_.walk == NormWalk::kCells && pass == NormPass::kGradientSums) {
    // With few lines, more threads share a line.
    const int64_t steps = power_of_two(divided_up(shape_.outer, of_cells), kThreads);
    const int64_t lanes = std::max(kWarp, kThreads / steps);
    return columns(1, shape_.outer, shape_.cells, width, of_cells, lanes);
  }
  return rows(width, of_rows);
}

int64_t NormPlan::workspace() const {
  int64_t most = 0;
  for (const bool is_wide : {false, true}) {
    const NormGrid sums = grid(NormPass::kSums, is_wide);
    const NormGrid gradients = grid(NormPass::kGradientSums, is_wide);
    const int64_t lines = shape_.outer * shape_.channels;
    const bool of_cells = shape_.walk == NormWalk::kCells;
    const int64_t of_gradients = of_cells ? lines * gradients.tiles + shape_.cells * gradients.parts
                                          : lines * gradients.parts;
    most = std::max({most, 2 * lines * sums.parts, 2 * of_gradients});
  }
  return most;
}

bool NormPlan::is_wide(NormPass pass, const NormTensors& tensors) const {
  if (shape_.dtype == Dtype::kFloat64) return false;
  const int64_t contiguous = shape_.walk == NormWalk::kColumns ? shape_.channels : shape_.cells;
  const int64_t bytes = kWide * item_bytes(shape_.dtype);
  const int64_t of_results = kWide * item_bytes(shape_.result_dtype);
  const int64_t written = pass == NormPass::kNormalize ? of_results : bytes;
  bool is_wide = contiguous % kWide == 0 && is_multiple(tensors.x, bytes) &&
                 is_multiple(tensors.gradient, of_results) && is_multiple(tensors.result, written);
  if (shape_.walk == NormWalk::kCells) {
    const int64_t of_parameters = kWide * item_bytes(tensors.parameter_dtype);
    is_wide = is_wide && is_multiple(tensors.weight, of_parameters) &&
              is_multiple(tensors.bias, of_parameters);
  }
  return is_wide;
}

void NormPlan::check_dtype(Dtype of_parameters) const {
  if ((of_parameters == Dtype::kFloat64) != (shape_.dtype == Dtype::kFloat64)) {
    throw TransportError("parameters are float64 if and only if the normalized cells are");
  }
}

NormCall NormPlan::call(NormPass pass, const NormTensors& tensors) const {
  const bool has_parameters = tensors.weight != nullptr || tensors.bias != nullptr;
  if (has_parameters) check_dtype(tensors.parameter_dtype);
  NormCall call{};
  call.pass = pass;
  call.walk = shape_.walk;
  call.is_wide = is_wide(pass, tensors);
  NormArguments& a = call.arguments;
  a.x = tensors.x;
  a.gradient = tensors.gradient;
  a.result = tensors.result;
  a.totals = tensors.totals;
  a.of_totals = tensors.of_totals;
  a.shifts = tensors.shifts;
  a.failed = tensors.failed;
  a.sums = tensors.sums;
  a.partials = tensors.workspace;
  a.weight = tensors.weight;
  a.bias = tensors.bias;
  a.of_weight = tensors.of_weight;
  a.of_bias = tensors.of_bias;
  a.parameter_dtype = tensors.parameter_dtype;
  a.outer = static_cast<uint32_t>(shape_.outer);
  a.cells = shape_.cells;
  a.channels = static_cast<uint32_t>(shape_.channels);
  a.groups = static_cast<uint32_t>(shape_.groups);
  a.group_size = static_cast<uint32_t>(shape_.group_size);
  a.group_offset = static_cast<uint32_t>(shape_.group_offset);
  a.count = shape_.count;
  a.eps = shape_.eps;
  a.dtype = shape_.dtype;
  a.result_dtype = shape_.result_dtype;
  a.shares_outer = shape_.shares_outer;
  a.subtracts_mean = shape_.subtracts_mean;
  a.has_parameters_of_cells = shape_.walk == NormWalk::kCells;
  a.grid = grid(pass, call.is_wide);
  return call;
}

NormCall NormPlan::sums(const NormTensors& tensors) const {
  NormCall made = call(NormPass::kSums, tensors);
  NormArguments& a = made.arguments;
  const bool is_statistic_of_line = shape_.group_size == 1 && shape_.group_offset == 0 &&
                                    shape_.groups == shape_.channels &&
                                    (!shape_.shares_outer || shape_.outer == 1);
  a.is_finished = a.grid.parts == 1 && is_statistic_of_line;
  return made;
}

NormCall NormPlan::finish_sums(const NormCall& sums) const {
  NormCall made = sums;
  made.pass = NormPass::kFinishSums;
  NormArguments& a = made.arguments;
  a.parts = sums.arguments.grid.parts;
  const int64_t lines = shape_.outer * shape_.channels;
  a.grid = {};
  a.grid.lanes = lanes_for(divided_up(lines * a.parts, statistics()));
  if (!a.is_finished) a.grid.blocks = number_of_blocks(blocks_of(statistics(), a.grid.lanes));
  return made;
}

NormCall NormPlan::normalize(const NormTensors& tensors, const NormRunning& running) const {
  if (running.mean != nullptr) check_dtype(running.dtype);
  NormCall made = call(NormPass::kNormalize, tensors);
  NormArguments& a = made.arguments;
  a.running_mean = running.mean;
  a.running_variance = running.variance;
  a.batches = running.batches;
  a.momentum = running.momentum;
  a.running_dtype = running.dtype;
  return made;
}

NormCall NormPlan::gradient_sums(const NormTensors& tensors) const {
  NormCall made = call(NormPass::kGradientSums, tensors);
  NormArguments& a = made.arguments;
  if (a.has_parameters_of_cells) {
    a.partials_of_cells = a.partials + 2 * shape_.outer * a.grid.tiles;
  }
  return made;
}

NormCall NormPlan::finish_gradient_sums(const NormCall& sums) const {
  NormCall made = sums;
  made.pass = NormPass::kFinishGradientSums;
  NormArguments& a = made.arguments;
  const NormGrid of_sums = sums.arguments.grid;
  const bool of_cells = a.has_parameters_of_cells;
  const int64_t lines = shape_.outer * shape_.channels;
  a.parts = of_cells ? of_sums.tiles : of_sums.parts;
  a.parts_of_cells = of_sums.parts;
  a.grid = {};
  a.grid.lanes = lanes_for(divided_up(lines * a.parts, statistics()));
  const int64_t of_statistics = blocks_of(statistics(), a.grid.lanes);
  a.statistic_blocks = number_of_blocks(of_statistics);
  a.lanes_of_parameters = lanes_for(of_cells ? a.parts_of_cells : shape_.outer * a.parts);
  const bool learns = a.of_weight != nullptr || a.of_bias != nullptr;
  const int64_t parameters = !learns ? 0 : of_cells ? shape_.cells : shape_.channels;
  a.grid.blocks = number_of_blocks(of_statistics + blocks_of(parameters, a.lanes_of_parameters));
  return made;
}

NormCall NormPlan::gradient(const NormTensors& tensors) const {
  return call(NormPass::kGradient, tensors);
}

}  // namespace gpudist
