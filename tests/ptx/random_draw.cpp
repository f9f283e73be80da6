// One random launch of a kernel that draws random numbers, compared with loops over the cells.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/random_body.h"
#include "launches.h"
#include "random_case.h"
#include "runtime.h"

namespace gpudist {

namespace ptx {

namespace {

constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat64, Dtype::kFloat16, Dtype::kBfloat16};
// Draws by launch class; each takes every dtype in turn.
constexpr Draw kDraws[] = {Draw::kScaled, Draw::kKept,      Draw::kUniform, Draw::kNormal,
                           Draw::kScaled, Draw::kBernoulli, Draw::kScaled,  Draw::kNormal,
                           Draw::kScaled, Draw::kUniform,   Draw::kScaled,  Draw::kBernoulli};
static_assert(kLaunchClasses == std::size(kDraws) * std::size(kDtypes));

// Addresses of which only touched pages take memory: strides between cells exceed 32 bits.
constexpr int64_t kFarBytes = int64_t{1} << 37;
constexpr int64_t kFarItems = (int64_t{1} << 32) + 24;

char* far_memory() {
  static char* const memory = reserve(kFarBytes);
  madvise(memory, kFarBytes, MADV_DONTNEED);
  return memory;
}

// The number from which `mixed` makes `z`.
uint64_t unmixed(uint64_t z) {
  z = (z ^ z >> 31 ^ z >> 62) * 0x319642B2D24D8EC3u;
  z = (z ^ z >> 27 ^ z >> 54) * 0x96DE1B173F119089u;
  return z ^ z >> 30 ^ z >> 60;
}

// A number of a cell at which arithmetic of normal numbers has an edge: the least or the greatest
// number, a mantissa near the square root of 1/2, or an angle near one that is as near to two
// quarters of a turn.
uint64_t edge_number() {
  constexpr uint64_t kHalfRoot = 0x16A09E667F3BCD, kEighth = uint64_t{1} << 50;
  const auto nearby = static_cast<uint64_t>(between(-1, 1)), low = random_bits() >> 53;
  switch (between(0, 3)) {
    case 0: return 0;
    case 1: return ~uint64_t{0};
    case 2: return (kHalfRoot - 1 + nearby) << 11 | low;
    default:
      const auto eighths = static_cast<uint64_t>(between(0, 8));
      return unmixed((eighths * kEighth + nearby) << 11 | low) - randomly::kStep;
  }
}

// A block of random cells, with its memory.
struct Block {
  RandomCells cells;
  std::vector<char> output, input;
  uint64_t words[4];  // seed, call, and keys that are read and written
  int64_t count = 1;
  int64_t bytes = 0;  // of an output item

  Block(Draw draw, Dtype dtype, bool is_large) {
    cells.draw = draw;
    cells.dtype = dtype;
    bytes = draw == Draw::kKept ? 1 : item_bytes(dtype);
    const int64_t most = is_large ? 150'000 : 6'000;
    // Rows of so many cells that their number exceeds 16 bits.
    if (is_large && one_of(2)) {
      cells.shape = {2, between(65'600, most / 2)};
      count = 2 * cells.shape[1];
    }
    const auto dims = static_cast<size_t>(between(0, kMaxDims + 1));
    for (size_t d = 0; d < dims; ++d) {
      const int64_t extent = one_of(3) ? between(1, most) : between(1, 9);
      cells.shape.push_back(std::min(extent, most / count));
      count *= cells.shape.back();
    }
    std::shuffle(cells.shape.begin(), cells.shape.end(), random_bits);
    cells.output_strides = dense(cells.shape, order(one_of(2)));
    index();
    for (uint64_t& word : words) word = random_bits();
    cells.dropped_below = static_cast<int64_t>(random_bits());
    cells.factor = static_cast<double>(between(1, 64)) / 16;
    // All cells are dropped.
    if (one_of(12)) cells.factor = std::numeric_limits<double>::infinity();
    if (one_of(2)) cells.stores_key = &words[3];
    switch (between(0, 3)) {
      case 0: cells.key = {&words[0], &words[1], nullptr, words[2]}; break;
      case 1: cells.key = {nullptr, &words[1], nullptr, words[2]}; break;
      case 2: cells.key = {nullptr, nullptr, &words[2], words[0]}; break;
      default: cells.key = {nullptr, nullptr, nullptr, words[0]};
    }
    if (draw == Draw::kNormal && one_of(2)) {
      const randomly::Key key(cells.key);
      cells.index = unmixed(unmixed(edge_number()) ^ key.second) - key.first;
    }
    // The first cell's number, or the next.
    if (one_of(2)) {
      const uint64_t number = randomly::Key(cells.key).number(cells.index);
      cells.dropped_below = static_cast<int64_t>(number + static_cast<uint64_t>(between(0, 1)));
    }
    // Some outputs do not begin where a granule does.
    const int64_t skew = one_of(6) ? bytes * between(0, 3) : 0;
    output.resize(static_cast<size_t>(count * bytes + skew));
    cells.output = output.data() + skew;
    if (draw == Draw::kScaled || (draw == Draw::kBernoulli && !one_of(3))) set_input();
  }

  // Permutation of the dims.
  std::vector<size_t> order(bool is_shuffled) {
    std::vector<size_t> dims(cells.shape.size());
    std::iota(dims.begin(), dims.end(), 0);
    if (is_shuffled) std::shuffle(dims.begin(), dims.end(), random_bits);
    return dims;
  }

  static std::vector<int64_t> dense(const std::vector<int64_t>& shape,
                                    const std::vector<size_t>& order) {
    std::vector<int64_t> strides(shape.size());
    int64_t stride = 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = stride;
      stride *= shape[order[i]];
    }
    return strides;
  }

  // Indices in a global tensor that is larger, perhaps by far; some dims share them.
  void index() {
    uint64_t stride = one_of(4) ? random_bits() >> 20 : 1;
    const bool is_whole = one_of(3);
    cells.index = is_whole ? 0 : random_bits() >> between(1, 63);
    for (size_t d = cells.shape.size(); d-- > 0;) {
      cells.index_strides.insert(cells.index_strides.begin(), one_of(8) ? 0 : stride);
      stride *= static_cast<uint64_t>(cells.shape[d] + (is_whole ? 0 : between(0, 3)));
    }
  }

  void set_input() {
    const int64_t kind = between(0, 5);
    std::vector<int64_t> strides =
        kind < 3 ? cells.output_strides : dense(cells.shape, order(true));
    int64_t last = 0;
    for (size_t d = 0; d < strides.size(); ++d) {
      if (kind == 4) strides[d] = one_of(2) ? 0 : 2 * strides[d];
      if (kind == 5 && cells.shape[d] <= 3 && last == 0) strides[d] = kFarItems;
      last += (cells.shape[d] - 1) * strides[d];
    }
    cells.input_strides = strides;
    const int64_t skew = one_of(6) ? bytes * between(0, 3) : 0, size = (last + 1) * bytes + skew;
    char* begin = nullptr;
    if (size < int64_t{1} << 24) {
      input.resize(static_cast<size_t>(size));
      begin = input.data();
    } else if (size <= kFarBytes) {
      begin = far_memory();
    } else {
      throw std::runtime_error("the far memory is too small");
    }
    cells.input = begin + skew;
    const bool has_specials = one_of(3);
    const std::vector<char> drawn = has_specials ? uniform_cells() : std::vector<char>();
    for_each_offset(0, 0, 0, [&](int64_t at, int64_t output_at) {
      char* const to = begin + skew + at * bytes;
      if (!has_specials || !one_of(4)) return put(to);
      uint64_t bits = special_bits();
      if (cells.draw == Draw::kBernoulli && !one_of(3)) {
        // The number that is drawn, or the next.
        std::memcpy(&bits, &drawn[static_cast<size_t>(output_at * bytes)], bytes);
        if (one_of(2)) ++bits;
      }
      std::memcpy(to, &bits, static_cast<size_t>(bytes));
    });
    add_live(begin, size, "the input");
  }

  template <class F>
  void for_each_offset(size_t d, int64_t input, int64_t output, const F& f) {
    if (d == cells.shape.size()) return f(input, output);
    for (int64_t i = 0; i < cells.shape[d]; ++i) {
      for_each_offset(d + 1, input + i * cells.input_strides[d],
                      output + i * cells.output_strides[d], f);
    }
  }

  // The uniform numbers of the cells, in the order of the output.
  std::vector<char> uniform_cells() const {
    std::vector<char> drawn(static_cast<size_t>(count * bytes));
    RandomCells uniform = cells;
    uniform.draw = Draw::kUniform;
    uniform.input = nullptr;
    uniform.output = drawn.data();
    uniform.stores_key = nullptr;
    for (const RandomArguments& launch : uniform.launches()) draw_on_host(launch);
    return drawn;
  }

  // Bits that are often those of zero, a subnormal number, infinity or NaN.
  uint64_t special_bits() const {
    const uint64_t exponent = cells.dtype == Dtype::kFloat64   ? 0x7ffull << 52
                              : cells.dtype == Dtype::kFloat32 ? 0x7f800000
                              : cells.dtype == Dtype::kFloat16 ? 0x7c00
                                                               : 0x7f80;
    uint64_t bits = random_bits();
    if (one_of(2)) bits = one_of(2) ? bits | exponent : bits & ~exponent;
    const uint64_t fraction = (exponent & -exponent) - 1;
    return one_of(3) ? bits & ~fraction : bits;
  }

  // A number between -4 and 4, or a probability.
  void put(char* at) const {
    const auto step = static_cast<double>(random_bits() >> 11) * 0x1p-53;
    const double value = cells.draw == Draw::kBernoulli ? step : 8 * step - 4;
    const auto narrow = static_cast<float>(value);
    const uint16_t half =
        cells.dtype == Dtype::kFloat16 ? float_to_float16(narrow) : float_to_bfloat16(narrow);
    if (cells.dtype == Dtype::kFloat64) std::memcpy(at, &value, sizeof(value));
    if (cells.dtype == Dtype::kFloat32) std::memcpy(at, &narrow, sizeof(narrow));
    if (is_narrow(cells.dtype)) std::memcpy(at, &half, sizeof(half));
  }
};

uint64_t rounded() {
  uint64_t sum = 0;
  for (const Counts& of_kernel : counts()) sum += of_kernel.rounded;
  return sum;
}

// Sum of the bits of the float64 numbers from which cells of other dtypes are rounded. Most errors
// of their last digits do not change a cell of 16 bits.
uint64_t sum_of_bits(RandomCells cells, int64_t count) {
  std::vector<uint64_t> numbers(static_cast<size_t>(count));
  cells.dtype = Dtype::kFloat64;
  cells.output = reinterpret_cast<char*>(numbers.data());
  cells.stores_key = nullptr;
  for (const RandomArguments& launch : cells.launches()) draw_on_host(launch);
  return std::accumulate(numbers.begin(), numbers.end(), uint64_t{0});
}

}  // namespace

std::string run_launch(uint64_t seed, uint64_t index) {
  begin_launch(seed, index);
  const bool is_large = index >= kFirstLarge || one_of(200);
  Block block(kDraws[index % std::size(kDraws)],
              kDtypes[index / std::size(kDraws) % std::size(kDtypes)], is_large);
  add_live(block.words, sizeof(block.words), "the key");
  add_live(block.cells.output, block.count * block.bytes, "the output");
  // Small launches split a block into several.
  const auto most = one_of(12) ? static_cast<uint32_t>(between(1, 5000)) : 1u << 30;
  std::vector<RandomArguments> launches = block.cells.launches(most);
  if (launches.size() > 40) launches = block.cells.launches();
  for (const RandomArguments& launch : launches) draw_on_host(launch);
  const std::vector<char> expected = block.output;
  uint64_t words[4];
  std::copy(std::begin(block.words), std::end(block.words), words);
  std::fill(block.output.begin(), block.output.end(), static_cast<char>(0x5a));
  std::memcpy(block.output.data(), expected.data(),
              static_cast<size_t>(block.cells.output - block.output.data()));
  block.words[3] = 0;
  const uint64_t rounded_before = rounded();
  for (RandomArguments& launch : launches) {
    // More tiles for each block than such small launches have.
    const uint32_t tiles = launch.blocks * launch.tiles;
    launch.tiles = static_cast<uint32_t>(between(1, 5));
    launch.blocks = (tiles - 1) / launch.tiles + 1;
    const std::string fault = fault_of(cuda_api()->launch_random(launch, nullptr));
    if (!fault.empty()) return fault;
  }
  const std::string which = ", draw " + std::to_string(static_cast<int>(block.cells.draw)) +
                            " of dtype " + std::to_string(static_cast<int>(block.cells.dtype));
  const RandomCells& cells = block.cells;
  const char* const drawn = expected.data() + (cells.output - block.output.data());
  const bool is_same = cells.draw == Draw::kKept
                           ? block.output == expected
                           : are_equal(cells.output, drawn, block.count * block.bytes, cells.dtype);
  if (!is_same) return "cells that are not those of plain loops" + which;
  if (cells.draw == Draw::kNormal && cells.dtype != Dtype::kFloat64 &&
      rounded() - rounded_before != sum_of_bits(cells, block.count)) {
    return "numbers before rounding that are not those of plain loops" + which;
  }
  if (block.cells.stores_key == nullptr) words[3] = 0;
  if (!std::equal(words, words + 4, block.words)) return "a key that is not that of loops" + which;
  return "";
}

}  // namespace ptx

}  // namespace gpudist
