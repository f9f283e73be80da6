// The passes of a normalization on a GPU. Host and device compile the same bodies, so that both
// compute the same bits.
//
// Terms: a line is the set of cells that are summed into one number; line `o * channels + c`
// belongs to channel `c`. A block of a tensor is stored by rows, `[outer, channels, cells]`, or by
// columns, `[outer, cells, channels]`. A line is divided into parts, one for each block of threads;
// partial sums are combined in an order that depends on the shape, the dtype, the alignment of the
// tensors and the number of multiprocessors alone.
#pragma once

#include <cstdint>

#include "core/box.h"
#include "core/packing.h"

namespace gpudist {

enum class NormPass : uint8_t {
  kSums,
  kFinishSums,
  kNormalize,
  kGradientSums,
  kFinishGradientSums,
  kGradient,
};

// How a block is stored, and what its parameters belong to.
enum class NormWalk : uint8_t {
  kRows,     // cells of a line are contiguous, parameters belong to channels
  kColumns,  // channels are contiguous, parameters belong to channels
  kCells,    // cells of a line are contiguous, parameters belong to cells; there is one channel
};

// Division of the work among blocks of threads.
struct NormGrid {
  uint32_t blocks = 0;
  uint32_t parts = 1;       // number of parts of a line
  uint32_t tiles = 1;       // number of tiles of columns that cover a row
  uint32_t lanes = 1;       // threads along contiguous memory, a power of two
  uint32_t part_cells = 0;  // most cells in a part
};

struct NormArguments {
  static constexpr uint32_t kThreads = 256;

  const char* x;
  const char* gradient;
  char* result;  // the normalized block, or its gradient
  double* totals;
  const double* of_totals;
  const double* shifts;  // totals whose means are subtracted from float64 cells, or null
  double* sums;          // of each statistic
  double* partials;      // two for each line and part
  double* partials_of_cells;
  // Null if there is none.
  const char* weight;
  const char* bias;
  char* of_weight;
  char* of_bias;
  char* running_mean;
  char* running_variance;
  const int64_t* batches;  // if not null, `momentum` is the reciprocal of this number
  // If it points to a nonzero word, totals were not moved: they and the results become NaN. May
  // point to host memory.
  const uint32_t* failed;

  int64_t cells;  // in a line
  uint32_t outer;
  uint32_t channels;
  // Channel `c` belongs to group `(c + group_offset) / group_size`.
  uint32_t groups;
  uint32_t group_size;
  uint32_t group_offset;
  double count;  // number of values per statistic over all workers
  double eps;
  double momentum;
  NormGrid grid;
  // Partials that a finishing pass combines.
  uint32_t parts;
  uint32_t parts_of_cells;
  uint32_t lanes_of_parameters;
  uint32_t statistic_blocks;
  Dtype dtype;         // of `x` and the gradient by it
  Dtype result_dtype;  // of the normalized block and `gradient`: `dtype`, or float32 of 16 bits
  // Those of float64 cells are float64, and no others.
  Dtype parameter_dtype;
  Dtype running_dtype;
  bool shares_outer;  // all outer indices share the statistics of a channel
  bool subtracts_mean;
  bool has_parameters_of_cells;
  bool is_finished;  // the first pass writes `sums`, not partials
};

struct NormCall {
  NormPass pass;
  NormWalk walk;
  bool is_wide;  // whether four cells are loaded together
  NormArguments arguments;
};

// Number of blocks of threads of a call.
inline uint32_t norm_blocks(const NormCall& call) {
  const bool updates = call.pass == NormPass::kNormalize && call.arguments.running_mean != nullptr;
  return call.arguments.grid.blocks + updates;
}

}  // namespace gpudist
