// Normalizations of more cells than 32 bits can number: some blocks of threads of each pass.
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/norm_body.h"
#include "norm_case.h"
#include "random_case.h"
#include "runtime.h"

namespace gpudist::ptx {

namespace {

constexpr int64_t kBytes = int64_t{1} << 35, kLines = 5;
// So many that a block of threads has few cells.
constexpr uint32_t kMultiprocessors = 60'000;

NormShape far_shape(NormShape shape, bool is_single) {
  const int64_t cells = (int64_t{1} << 30) + 4 * between(1, 1000);
  shape.outer = shape.walk == NormWalk::kCells ? kLines : 1;
  shape.channels = shape.walk == NormWalk::kRows ? kLines : 1;
  shape.cells = is_single ? cells + 1 : cells;
  if (shape.walk == NormWalk::kColumns) shape.channels = is_single ? kLines : 4;
  shape.groups = shape.channels;
  shape.group_size = 1;
  shape.group_offset = 0;
  shape.shares_outer = false;
  shape.count = 2.0 * static_cast<double>(cells);
  return shape;
}

// A cell that a block of threads has: its item of the tensors, and its pairs of partial sums.
struct Cell {
  int64_t item, partial, partial_of_cells;
};

bool sums_cells(const NormCall& call) {
  return call.walk == NormWalk::kCells && call.pass == NormPass::kGradientSums;
}

std::vector<Cell> cells_of(const NormCall& call, int64_t block) {
  const NormArguments& a = call.arguments;
  const NormGrid& grid = a.grid;
  std::vector<Cell> cells;
  const auto for_part = [&](int64_t part, int64_t extent, const auto& visit) {
    const int64_t begin = part * grid.part_cells;
    for (int64_t i = begin; i < std::min(begin + grid.part_cells, extent); ++i) visit(i);
  };
  if (call.walk != NormWalk::kColumns && !sums_cells(call)) {
    const int64_t line = block / grid.parts, part = block % grid.parts;
    for_part(part, a.cells, [&](int64_t i) {
      cells.push_back({line * a.cells + i, line * grid.parts + part, 0});
    });
    return cells;
  }
  // Part of a table whose rows are contiguous: the lines, or a cell of each line.
  const bool of_cells = sums_cells(call);
  const int64_t row_items = of_cells ? a.cells : a.channels, rows = of_cells ? a.outer : a.cells;
  const int64_t tile = block % grid.tiles, part = block / grid.tiles;
  const int64_t width = int64_t{grid.lanes} * (call.is_wide ? 4 : 1);
  for_part(part, rows, [&](int64_t row) {
    for (int64_t i = tile * width; i < std::min((tile + 1) * width, row_items); ++i) {
      const int64_t of_column = i * grid.parts + part;
      cells.push_back({row * row_items + i, of_cells ? row * grid.tiles + tile : of_column,
                       of_cells ? of_column : 0});
    }
  });
  return cells;
}

// The memory of a launch; only touched pages take any.
struct FarMemory {
  char* const x = reserve(kBytes);
  char* const gradient = reserve(kBytes);
  char* const result = reserve(kBytes);
  char* const workspace = reserve(kBytes);

  static void clear(char* memory) { madvise(memory, kBytes, MADV_DONTNEED); }
};

// What a call wrote for these cells.
std::vector<double> written(const NormCall& call, const std::vector<Cell>& cells) {
  const NormArguments& a = call.arguments;
  const Dtype dtype = call.pass == NormPass::kNormalize ? a.result_dtype : a.dtype;
  std::vector<double> found;
  for (const Cell& cell : cells) {
    if (a.result != nullptr) {
      found.push_back(norming::value_at(a.result, cell.item, dtype));
      continue;
    }
    for (int i = 0; i < 2; ++i) {
      found.push_back(a.partials[2 * cell.partial + i]);
      if (sums_cells(call)) found.push_back(a.partials_of_cells[2 * cell.partial_of_cells + i]);
    }
  }
  return found;
}

std::string run_call(const NormCall& call, const FarMemory& memory) {
  const NormArguments& a = call.arguments;
  const uint32_t stride = std::max(1u, a.grid.blocks / 3);
  std::vector<Cell> cells;
  for (uint32_t block = 0; block < a.grid.blocks; block += stride) {
    const std::vector<Cell> own =
        cells_of(call, a.result != nullptr ? a.grid.blocks - 1 - block : block);
    cells.insert(cells.end(), own.begin(), own.end());
  }
  for (const Cell& cell : cells) {
    norming::put_value(memory.x, cell.item, a.dtype, static_cast<float>(between(-64, 64)) / 16);
    norming::put_value(memory.gradient, cell.item, a.result_dtype,
                       static_cast<float>(between(-64, 64)) / 16);
  }
  for (uint32_t block = 0; block < a.grid.blocks; block += stride) run_on_host(call, block);
  const std::vector<double> expected = written(call, cells);
  if (std::count(expected.begin(), expected.end(), 0.0) * 2 >
      static_cast<int64_t>(expected.size())) {
    return "the host wrote no far cells";
  }
  FarMemory::clear(memory.result);
  FarMemory::clear(memory.workspace);
  manner().block_stride = stride;
  const std::string fault = fault_of(cuda_api()->launch_norm(call, nullptr));
  manner().block_stride = 1;
  if (!fault.empty()) return fault;
  return written(call, cells) == expected ? "" : "far cells differ from the host's";
}

}  // namespace

void run_on_host(const NormCall& call, uint32_t block) {
  norming::visit_body(call, [&](auto body) {
    using Body = decltype(body);
    typename Body::Shared shared;
    Body::run(call.arguments, block, norming::HostThreads{}, shared);
    return 0;
  });
}

std::string run_far_norm(const NormShape& like, bool is_single) {
  static const FarMemory memory;
  const NormShape shape = far_shape(like, is_single);
  const NormPlan plan(shape, kMultiprocessors);
  const std::vector<double> totals(2 * kLines, 0.5 * shape.count), of_totals(2 * kLines, 0.25);
  for (char* const part : {memory.x, memory.gradient, memory.result, memory.workspace}) {
    FarMemory::clear(part);
    add_live(part, kBytes, "a far tensor");
  }
  for (const auto* numbers : {&totals, &of_totals}) {
    add_live(numbers->data(), static_cast<int64_t>(8 * numbers->size()), "the totals");
  }
  NormTensors t;
  t.x = memory.x;
  t.totals = totals.data();
  t.workspace = reinterpret_cast<double*>(memory.workspace);
  NormTensors of_y = t, of_x = t;
  of_y.result = memory.result;
  of_x.gradient = memory.gradient;
  const NormCall of_sums = plan.gradient_sums(of_x);
  of_x.result = memory.result;
  of_x.of_totals = of_totals.data();
  for (const NormCall& call :
       {plan.sums(t), plan.normalize(of_y, {}), of_sums, plan.gradient(of_x)}) {
    std::string wrong = run_call(call, memory);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace gpudist::ptx
