// Normalizations of more cells than 32 bits can number: some blocks of threads of each pass.
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "core/norm_body.h"
#include "norm_case.h"
#include "random_case.h"
#include "runtime.h"

namespace gpudist::ptx {

namespace {

constexpr int64_t kBytes = int64_t{1} << 39;
// So many that a block of threads has few cells.
constexpr uint32_t kMultiprocessors = 60'000;
constexpr int64_t kThreads = NormArguments::kThreads;

// Memory of a launch; only touched pages take any.
enum FarPart {
  kFarX,
  kFarG,
  kFarResult,
  kFarWorkspace,
  kFarTotals,
  kFarShifts,
  kFarSums,
  kFarWeight,
  kFarBias,
  kFarOfWeight,
  kFarOfBias,
  kFarParts
};
using FarMemory = std::array<char*, kFarParts>;

void clear(char* memory) {
  madvise(memory, kBytes, MADV_DONTNEED);
}

FarMemory reserve_all() {
  FarMemory made;
  for (char*& part : made) part = reserve(kBytes);
  return made;
}

// Few lines, of more cells than 32 bits can number; or many lines, whose parameters or statistics
// lie more than 4 GiB apart.
NormShape far_shape(NormShape shape, bool is_single, bool has_many_lines) {
  const int64_t many = 3 * (int64_t{1} << 29) + 4 * between(1, 1000) + is_single;
  const int64_t cells = 2 * (int64_t{1} << 32) + 4 * between(1, 1000) + is_single;
  const int64_t few = is_single ? 5 : 4;
  shape.outer = shape.channels = 1;
  if (shape.walk == NormWalk::kCells) {
    shape.outer = has_many_lines ? many : 9;
    shape.cells = has_many_lines ? few : many;
  } else if (!has_many_lines) {
    (shape.walk == NormWalk::kColumns || one_of(2) ? shape.channels : shape.outer) = few;
    shape.cells = cells;
  } else {
    shape.outer = one_of(2) ? 3 : 1;
    shape.channels = many / shape.outer / 4 * 4 + is_single;
    // Several rows for each thread, if they fit the memory.
    const bool is_high = shape.walk == NormWalk::kColumns && shape.outer == 1;
    shape.cells = !is_high ? few : item_bytes(shape.dtype) == 8 ? 20 : 33;
  }
  shape.groups = shape.channels;
  shape.group_size = 1;
  shape.group_offset = 0;
  shape.shares_outer = false;
  shape.count = 2.0 * static_cast<double>(shape.cells);
  return shape;
}

// A cell that a block of threads has: its item of the tensors, its line, and its pairs of partial
// sums.
struct Cell {
  int64_t item, line, parameter, partial, partial_of_cells;
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
  const bool of_cells = call.walk == NormWalk::kCells;
  if (call.walk != NormWalk::kColumns && !sums_cells(call)) {
    const int64_t lines = kThreads / grid.lanes, part = block % grid.parts;
    const int64_t first = block / grid.parts * lines;
    for (int64_t line = first; line < std::min(first + lines, int64_t{a.outer} * a.channels);
         ++line) {
      for_part(part, a.cells, [&](int64_t i) {
        cells.push_back({line * a.cells + i, line, of_cells ? i : line % a.channels,
                         line * grid.parts + part, 0});
      });
    }
    return cells;
  }
  // Part of a table whose rows are contiguous: the lines, or a cell of each line.
  const int64_t row_items = of_cells ? a.cells : a.channels, rows = of_cells ? a.outer : a.cells;
  const int64_t tile = block % grid.tiles, rest = block / grid.tiles;
  const int64_t part = rest % grid.parts, outer = of_cells ? 0 : rest / grid.parts;
  const int64_t width = int64_t{grid.lanes} * (call.is_wide ? 4 : 1);
  for_part(part, rows, [&](int64_t row) {
    for (int64_t i = tile * width; i < std::min((tile + 1) * width, row_items); ++i) {
      const int64_t line = outer * row_items + i, of_column = line * grid.parts + part;
      cells.push_back({(outer * rows + row) * row_items + i, of_cells ? row : line, i,
                       of_cells ? row * grid.tiles + tile : of_column, of_cells ? of_column : 0});
    }
  });
  return cells;
}

// What a call wrote for these cells.
std::vector<double> written(const NormCall& call, const std::vector<Cell>& cells) {
  const NormArguments& a = call.arguments;
  const Dtype dtype = call.pass == NormPass::kNormalize ? a.result_dtype : a.dtype;
  std::vector<double> found;
  for (const Cell& cell : cells) {
    if (a.result != nullptr) {
      found.push_back(item_of(a.result, cell.item, dtype));
      continue;
    }
    for (int64_t i = 0; i < 2; ++i) {
      if (a.is_finished && (a.subtracts_mean || i == 0)) {
        found.push_back(a.sums[a.subtracts_mean ? 2 * cell.line + i : cell.line]);
      }
      found.push_back(a.partials[2 * cell.partial + i]);
      if (sums_cells(call)) found.push_back(a.partials_of_cells[2 * cell.partial_of_cells + i]);
    }
  }
  return found;
}

// What a finishing call wrote for these results.
std::vector<double> finished(const NormCall& call, const std::vector<int64_t>& results) {
  const NormArguments& a = call.arguments;
  const int64_t width = a.subtracts_mean ? 2 : 1;
  std::vector<double> found;
  for (const int64_t result : results) {
    for (int64_t i = 0; i < width; ++i) found.push_back(a.sums[width * result + i]);
    for (const char* of : {a.of_weight, a.of_bias}) {
      if (of != nullptr) found.push_back(item_of(of, result, a.parameter_dtype));
    }
  }
  return found;
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

namespace {

// Run every `stride`-th block of a call on the host and on the device; `read` returns what it
// wrote.
template <class Read>
std::string compare(const NormCall& call, uint32_t stride, const FarMemory& memory,
                    const Read& read) {
  const auto clear_results = [&] {
    for (const FarPart part : {kFarResult, kFarSums, kFarOfWeight, kFarOfBias}) {
      clear(memory[part]);
    }
    const bool reads_workspace = call.pass == NormPass::kFinishGradientSums;
    if (!reads_workspace) clear(memory[kFarWorkspace]);
  };
  clear_results();
  for (uint32_t block = 0; block < call.arguments.grid.blocks; block += stride) {
    run_on_host(call, block);
  }
  const std::vector<double> expected = read();
  if (std::count(expected.begin(), expected.end(), 0.0) * 4 >
      static_cast<int64_t>(expected.size()) * 3) {
    return "the host wrote no far cells";
  }
  clear_results();
  manner().block_stride = stride;
  const std::string fault = fault_of(cuda_api()->launch_norm(call, nullptr));
  manner().block_stride = 1;
  if (!fault.empty()) return fault;
  return read() == expected ? "" : "far cells differ from the host's";
}

double random_value() {
  return static_cast<double>(between(-64, 64)) / 16;
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
  const int64_t width = a.subtracts_mean ? 2 : 1;
  for (const Cell& cell : cells) {
    put_item(memory[kFarX], cell.item, a.dtype, random_value());
    put_item(memory[kFarG], cell.item, a.result_dtype, random_value());
    for (const FarPart part : {kFarWeight, kFarBias}) {
      put_item(memory[part], cell.parameter, a.parameter_dtype, random_value());
    }
    for (const FarPart part : {kFarTotals, kFarShifts}) {
      auto* const of_line = reinterpret_cast<double*>(memory[part]) + width * cell.line;
      for (int64_t i = 0; i < width; ++i) of_line[i] = (1 + 0.1 * random_value()) * a.count;
    }
  }
  return compare(call, stride, memory, [&] { return written(call, cells); });
}

// The statistics and parameters of some blocks of threads that finish sums of gradients.
std::string run_finish(NormCall call, const FarMemory& memory) {
  NormArguments& a = call.arguments;
  // A statistic of long lines is the sum of more partials than a test can add up.
  constexpr uint32_t kMostParts = 4096;
  if (a.parts > kMostParts) {
    a.grid.blocks -= a.statistic_blocks;
    a.statistic_blocks = 0;
  }
  if (a.grid.blocks == 0) return "";
  const uint32_t stride = std::max(1u, a.grid.blocks / 3);
  std::vector<int64_t> results;
  const auto put_partials = [&](double* partials, int64_t result, int64_t parts) {
    for (int64_t i = 0; i < 2 * parts; ++i) partials[2 * result * parts + i] = random_value();
  };
  for (uint32_t block = 0; block < a.grid.blocks; block += stride) {
    const bool of_statistics = block < a.statistic_blocks;
    const int64_t many = kThreads / (of_statistics ? a.grid.lanes : a.lanes_of_parameters);
    const int64_t first = (of_statistics ? block : block - a.statistic_blocks) * many;
    const bool of_cells = a.has_parameters_of_cells && !of_statistics;
    const int64_t lines = int64_t{a.outer} * a.channels;
    const int64_t most = of_statistics ? lines : of_cells ? a.cells : a.channels;
    const int64_t outers = of_statistics || of_cells ? 1 : a.outer;
    for (int64_t i = first; i < std::min(first + many, most); ++i) {
      results.push_back(i);
      put_item(memory[kFarWeight], i % a.channels, a.parameter_dtype, random_value());
      for (int64_t line = i; line < i + outers * a.channels; line += a.channels) {
        put_partials(of_cells ? a.partials_of_cells : a.partials, line,
                     of_cells ? a.parts_of_cells : a.parts);
        auto* const totals = reinterpret_cast<double*>(memory[kFarTotals]);
        totals[2 * line] = totals[2 * line + 1] = a.count;
      }
    }
  }
  return compare(call, stride, memory, [&] { return finished(call, results); });
}

}  // namespace

std::string run_far_norm(const NormShape& like, Dtype parameter_dtype, bool is_single) {
  static const FarMemory memory = reserve_all();
  const bool has_many_lines = one_of(2);
  const NormShape shape = far_shape(like, is_single, has_many_lines);
  const NormPlan plan(shape, kMultiprocessors);
  for (char* const part : memory) {
    clear(part);
    add_live(part, kBytes, "a far tensor");
  }
  const auto numbers = [&](FarPart part) { return reinterpret_cast<double*>(memory[part]); };
  NormTensors t;
  t.x = memory[kFarX];
  t.workspace = numbers(kFarWorkspace);
  t.parameter_dtype = parameter_dtype;
  const bool has_shifts = shape.dtype == Dtype::kFloat64 && shape.subtracts_mean;
  if (has_shifts) t.shifts = numbers(kFarShifts);
  NormTensors of_sums = t, of_y = t, of_x = t;
  of_sums.sums = numbers(kFarSums);
  of_y.totals = of_x.totals = numbers(kFarTotals);
  of_y.weight = of_x.weight = memory[kFarWeight];
  of_y.bias = memory[kFarBias];
  of_y.result = memory[kFarResult];
  of_x.gradient = memory[kFarG];
  NormTensors of_totals = of_x;
  of_x.result = memory[kFarResult];
  of_x.of_totals = numbers(kFarTotals);
  of_totals.sums = numbers(kFarSums);
  // So is a parameter of few channels.
  if (shape.walk == NormWalk::kCells ? !has_many_lines : shape.channels > 9) {
    of_totals.of_weight = memory[kFarOfWeight];
    of_totals.of_bias = memory[kFarOfBias];
  }
  const NormCall gradient_sums = plan.gradient_sums(of_totals);
  for (const NormCall& call :
       {plan.sums(of_sums), plan.normalize(of_y, {}), gradient_sums, plan.gradient(of_x)}) {
    std::string wrong = run_call(call, memory);
    if (!wrong.empty()) return wrong;
  }
  return run_finish(plan.finish_gradient_sums(gradient_sums), memory);
}

}  // namespace gpudist::ptx
