#include "core/random_cells.h"

#include <algorithm>
#include <utility>

#include "core/random_body.h"

namespace gpudist {

namespace {

using randomly::Cell;
using randomly::Key;
using randomly::kMayBeNan;
using randomly::kReads;

// Enough blocks for every GPU; more of them would only compute the key more often.
constexpr uint32_t kBlocksToFill = 2048;
constexpr uint32_t kMostTiles = 8;

struct Dim {
  int64_t shape;
  uint64_t index;
  int64_t input;
  int64_t output;

  // Whether this dim and the next inner one are like a single dim.
  bool continues(const Dim& inner) const {
    const auto extent = static_cast<uint64_t>(inner.shape);
    return index == inner.index * extent && input == inner.input * inner.shape &&
           output == inner.output * inner.shape;
  }
};

// Dims outermost first in the output's memory, merged where possible.
std::vector<Dim> dims_of(const RandomCells& cells) {
  std::vector<Dim> dims, merged;
  for (size_t d = 0; d < cells.shape.size(); ++d) {
    if (cells.shape[d] == 1) continue;
    const int64_t input = cells.input == nullptr ? 0 : cells.input_strides[d];
    dims.push_back({cells.shape[d], cells.index_strides[d], input, cells.output_strides[d]});
  }
  std::stable_sort(dims.begin(), dims.end(),
                   [](const Dim& a, const Dim& b) { return a.output > b.output; });
  for (const Dim& dim : dims) {
    if (!merged.empty() && merged.back().continues(dim)) {
      merged.back() = {merged.back().shape * dim.shape, dim.index, dim.input, dim.output};
    } else {
      merged.push_back(dim);
    }
  }
  // Without an input, its strides do not keep dims apart.
  if (cells.input == nullptr) {
    for (Dim& dim : merged) dim.input = 0;
  }
  if (merged.empty()) merged.push_back({1, 0, 1, 1});
  return merged;
}

bool is_aligned(const void* address, uint32_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

struct Launches {
  const RandomCells& cells;
  uint32_t most_cells;
  std::vector<RandomArguments> made = {};

  int64_t item_bytes() const {
    return cells.draw == Draw::kKept ? 1 : gpudist::item_bytes(cells.dtype);
  }

  // Add the launches of a part: the dims from `outer` on, at these offsets.
  void add(const std::vector<Dim>& dims, size_t outer, uint64_t index, int64_t input,
           int64_t output) {
    int64_t inner_cells = 1;
    for (size_t d = outer + 1; d < dims.size(); ++d) inner_cells *= dims[d].shape;
    const Dim& dim = dims[outer];
    const bool fits = dims.size() - outer <= kMaxDims;
    if (fits && inner_cells <= most_cells / dim.shape) {
      return add_one(dims, outer, dim.shape, inner_cells, index, input, output);
    }
    // Parts of a multiple of 16 rows keep granules aligned.
    int64_t step = fits ? most_cells / inner_cells : 0;
    if (step >= 16) step -= step % 16;
    for (int64_t start = 0; start < dim.shape; start += std::max<int64_t>(step, 1)) {
      const uint64_t at = index + static_cast<uint64_t>(start) * dim.index;
      const int64_t in = input + start * dim.input, out = output + start * dim.output;
      if (step == 0) {
        add(dims, outer + 1, at, in, out);
      } else {
        add_one(dims, outer, std::min(step, dim.shape - start), inner_cells, at, in, out);
      }
    }
  }

  void add_one(const std::vector<Dim>& dims, size_t outer, int64_t extent, int64_t inner_cells,
               uint64_t index, int64_t input, int64_t output) {
    RandomArguments one{};
    one.input = cells.input == nullptr ? nullptr : cells.input + input * item_bytes();
    one.output = cells.output + output * item_bytes();
    one.stores_key = made.empty() ? cells.stores_key : nullptr;
    one.key = cells.key;
    one.index = index;
    one.dropped_below = cells.dropped_below;
    // The first is zero, unless the factor is infinite.
    one.wide_factors = {0 * cells.factor, cells.factor};
    one.factors = {static_cast<float>(0 * cells.factor), static_cast<float>(cells.factor)};
    one.draw = cells.draw;
    one.dtype = cells.dtype;
    one.cells = static_cast<uint32_t>(extent * inner_cells);
    bool is_dense = true;
    for (size_t d = dims.size(); d-- > outer;) {
      const int64_t shape = d == outer ? extent : dims[d].shape;
      one.shape[one.dims] = Divisor::of(shape);
      one.index_stride[one.dims] = dims[d].index;
      one.input_stride[one.dims] = dims[d].input;
      is_dense = is_dense && (one.input == nullptr || dims[d].input == dims[d].output);
      ++one.dims;
    }
    const auto granule = static_cast<uint32_t>(cells.draw == Draw::kKept ? 4 : 16);
    const auto items = granule / static_cast<uint32_t>(item_bytes());
    one.moves_granules = is_dense && is_aligned(one.input, granule) &&
                         is_aligned(one.output, granule) &&
                         (one.dims == 1 || one.shape[0].value >= items);
    const uint32_t tile = RandomArguments::kThreads * items, tiles = (one.cells - 1) / tile + 1;
    one.tiles = std::clamp(tiles / kBlocksToFill, 1u, kMostTiles);
    one.blocks = (tiles - 1) / one.tiles + 1;
    made.push_back(one);
  }
};

// Rows of a launch: the innermost dim, one row after the other.
template <class F>
[[gnu::always_inline]] inline void for_each_row(const RandomArguments& arguments, F f) {
  uint32_t coordinate[kMaxDims] = {};
  uint64_t index = arguments.index;
  int64_t input = 0;
  const uint32_t row = arguments.shape[0].value;
  for (uint32_t cell = 0; cell < arguments.cells; cell += row) {
    f(cell, row, index, input);
    for (int d = 1; d < arguments.dims; ++d) {
      index += arguments.index_stride[d];
      input += arguments.input_stride[d];
      if (++coordinate[d] < arguments.shape[d].value) break;
      coordinate[d] = 0;
      index -= arguments.shape[d].value * arguments.index_stride[d];
      input -= arguments.shape[d].value * arguments.input_stride[d];
    }
  }
}

template <Draw kDraw, class Cells>
struct DrawRows {
  [[gnu::always_inline]] inline static void run(const RandomArguments& arguments) {
    constexpr uint32_t kTogether = 256;
    using Value = typename Cells::Value;
    const Key key(arguments.key);
    if (arguments.stores_key != nullptr) *arguments.stores_key = key.first;
    const Cell<kDraw, Cells> make(arguments);
    const auto put = [&](uint32_t cell, Value value) __attribute__((always_inline)) {
      Cells::template store<kMayBeNan<kDraw>>(arguments.output, cell, value);
    };
    const uint64_t step = arguments.index_stride[0];
    const int64_t stride = arguments.input_stride[0];
    const auto draw_row = [&](uint32_t cell, uint32_t row, uint64_t index, int64_t input)
                              __attribute__((always_inline)) {
                                for (uint32_t start = 0; start < row; start += kTogether) {
                                  const uint32_t count = std::min(kTogether, row - start);
                                  uint64_t numbers[kTogether];
                                  Value values[kTogether] = {};
                                  if (step != 0) {
                                    for (uint32_t k = 0; k < count; ++k)
                                      numbers[k] = key.number(index + (start + k) * step);
                                  }
                                  if constexpr (kReads<kDraw>) {
                                    const int64_t from = input + start * stride;
                                    if (arguments.input == nullptr) {
                                      std::fill_n(values, count, make.factor);
                                    } else if (stride == 1) {
                                      for (uint32_t k = 0; k < count; ++k)
                                        values[k] = Cells::load(arguments.input, from + k);
                                    } else {
                                      for (uint32_t k = 0; k < count; ++k) {
                                        values[k] = Cells::load(arguments.input, from + k * stride);
                                      }
                                    }
                                  }
                                  const uint32_t first = cell + start;
                                  if (step != 0) {
                                    for (uint32_t k = 0; k < count; ++k) {
                                      put(first + k, make(values[k], numbers[k]));
                                    }
                                  } else {
                                    // All cells of the row have the same number.
                                    const uint64_t number = key.number(index);
                                    for (uint32_t k = 0; k < count; ++k) {
                                      put(first + k, make(values[k], number));
                                    }
                                  }
                                }
                              };
    for_each_row(arguments, draw_row);
  }
};

#if defined(__x86_64__)
const bool has_wide_lanes = __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512bw");

// The same loops compiled for AVX-512, which multiplies 64-bit integers.
template <class Rows>
[[gnu::target("avx512f,avx512dq,avx512vl,avx512bw")]] void run_wide(
    const RandomArguments& arguments) {
  Rows::run(arguments);
}
#endif

}  // namespace

uint64_t key_of(uint64_t seed, uint64_t call) {
  return Key::of(seed, call);
}

std::vector<RandomArguments> RandomCells::launches(uint32_t most_cells) const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return {};
  Launches launches{*this, most_cells};
  launches.add(dims_of(*this), 0, index, 0, 0);
  return std::move(launches.made);
}

void draw_on_host(const RandomArguments& arguments) {
  randomly::with_types(arguments.draw, arguments.dtype, [&](auto draw, auto cells) {
    using Rows = DrawRows<decltype(draw)::value, decltype(cells)>;
#if defined(__x86_64__)
    if (has_wide_lanes) return run_wide<Rows>(arguments);
#endif
    Rows::run(arguments);
  });
}

}  // namespace gpudist
