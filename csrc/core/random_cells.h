// Random numbers of the cells of a block. A cell's number depends on a key and on the cell's index
// in the global tensor, so that it is the same for every partition and memory layout. Host and
// device compile the same arithmetic.
#pragma once

#include <cstdint>
#include <vector>

#include "core/box.h"
#include "core/combine.h"
#include "core/packing.h"

namespace gpudist {

enum class Draw : uint8_t {
  kKept,       // whether the cell is kept, as a bool; no input
  kUniform,    // from [0, 1); no input
  kNormal,     // standard normal; no input
  kBernoulli,  // 1 with the probability in the input, or with `factor` if there is none, else 0
  kScaled,     // the input, times `factor` if the cell is kept, otherwise times 0 * `factor`
};

// Source of the key: the number of the call at an address, with the seed at an address or as a
// number; or the key at an address; or the key as a number.
struct RandomKey {
  const uint64_t* seed = nullptr;
  const uint64_t* call = nullptr;
  const uint64_t* stored = nullptr;
  uint64_t number = 0;
};

// What a dropped and a kept cell are multiplied with.
template <class T>
struct Factors {
  T dropped;
  T kept;
};

// A launch: at most kMostCells cells, in the order of the output's memory, which has no gaps.
// Dims are innermost first. Strides and offsets are in items; those of indices may be any numbers
// modulo 2^64.
struct RandomArguments {
  static constexpr int kThreads = 256;
  static constexpr uint32_t kMostCells = 1u << 30;

  const char* input;  // null if there is none
  char* output;
  uint64_t* stores_key;  // address to which the launch writes the key; may be null
  RandomKey key;
  uint64_t index;  // of the first cell
  int64_t dropped_below;
  Factors<double> wide_factors;
  Factors<float> factors;
  uint32_t cells;
  uint32_t tiles;  // for each block, of a granule for each thread
  int32_t dims;    // at least 1
  Draw draw;
  Dtype dtype;
  // Whether granules are aligned, the input's in the output's order, and no longer than a row.
  bool moves_granules;
  Divisor shape[kMaxDims];
  uint64_t index_stride[kMaxDims];
  int64_t input_stride[kMaxDims];
  uint32_t blocks;
};

// Cells of a block, and where its input and output have them.
struct RandomCells {
  Draw draw;
  Dtype dtype;  // of input and output; ignored for kKept
  std::vector<int64_t> shape;
  std::vector<uint64_t> index_strides;
  std::vector<int64_t> input_strides;
  // Of memory without gaps.
  std::vector<int64_t> output_strides;
  uint64_t index = 0;
  RandomKey key;
  int64_t dropped_below = 0;
  double factor = 0;  // or a probability
  const char* input = nullptr;
  char* output = nullptr;
  uint64_t* stores_key = nullptr;

  // The launches that draw all cells.
  std::vector<RandomArguments> launches(uint32_t most_cells = RandomArguments::kMostCells) const;
};

// The key of these numbers of a seed and a call.
uint64_t key_of(uint64_t seed, uint64_t call);

// Carry out one launch on this thread.
void draw_on_host(const RandomArguments& arguments);

}  // namespace gpudist
