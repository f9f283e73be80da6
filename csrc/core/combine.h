// The combine kernel: each cell of a destination box becomes the ordered sum of cells of other
// boxes. One summand makes it a copy (pack, unpack), no summand a fill. Host and device compile the
// same body.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/box.h"
#include "core/half.h"
#include "core/packing.h"

namespace gpudist {

// Buffer that a view refers to.
enum class Buffer : uint8_t { kInput, kOutput, kSent, kReceived };
constexpr int kBuffers = 4;

// Exact division of numbers below 2^31 by a divisor fixed in advance.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = uint32_t{1} << 31;
  uint8_t shift = 0;

  static Divisor of(int64_t value) {
    Divisor divisor;
    divisor.value = static_cast<uint32_t>(value);
    while ((int64_t{1} << divisor.shift) < value) ++divisor.shift;
    const int64_t dividend = int64_t{1} << (31 + divisor.shift);
    divisor.multiplier = static_cast<uint32_t>((dividend + value - 1) / value);
    return divisor;
  }
  GPUDIST_HOST_DEVICE uint32_t quotient(uint32_t number) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(2 * number) * multiplier) >> 32) >> shift;
  }
};

// Terms: a granule is 16 bytes at an address divisible by 16. A job is one box, stored as lines of
// rows of contiguous bytes. A tile is the work of one thread: one granule of the destination in
// each of four rows of a line. More rows leave more of the memory's bandwidth unused on an H200.
struct CombineTile {
  static constexpr int kGranule = 16;
  static constexpr int kRows = 4;
};

// Location of a job's cells in one buffer, in bytes from the start of the buffer. Strides are never
// negative, so all cells lie between `offset` and `stop`.
struct CombineView {
  static constexpr int kDims = kMaxDims - 1;

  int64_t offset;
  int64_t stop;
  int64_t step;
  int64_t reach;          // from a tile's column to the end of the granules of its last row
  int64_t tile_stride;    // between neighbouring tiles of a line
  int64_t stride[kDims];  // between neighbouring lines
  Buffer buffer;
};

struct CombineJob {
  static constexpr int kAlreadyThere = -1;  // `summands` of a job whose cells have their values

  uint32_t tiles;        // total number
  uint32_t first_block;  // in the launch; in each group if blocks of the job alternate with others'
  uint32_t blocks;
  uint32_t group_blocks;  // blocks in each group, or 0
  uint32_t first_view;    // index of the destination's view; those of the summands follow
  // Bytes of one row, and of all rows of a line. The last row may be shorter than the others.
  int32_t row_bytes;
  int32_t line_bytes;
  // Distance in row bytes between neighbouring tiles of a line, and between neighbouring rows of a
  // tile.
  int32_t tile_bytes;
  int32_t step_bytes;
  int16_t summands;
  uint8_t dims;     // number of dims that index lines, outermost first
  uint8_t unit;     // at most 16: divides all addresses, strides and extents
  Divisor columns;  // number of tiles along a row
  Divisor line;     // number of tiles along a line
  Divisor shape[CombineView::kDims];
};

struct CombineArguments {
  static constexpr int kThreads = 256;

  char* buffers[kBuffers];
  // The tables: in device memory if `inline_bytes` is 0; otherwise in host memory, contiguous from
  // `jobs` on, and passed with the kernel's arguments.
  const CombineJob* jobs;
  const CombineView* views;
  uint32_t inline_bytes;
  uint32_t job_count;
  uint32_t blocks;
  // The first jobs, in groups of blocks: each group has blocks of each of these jobs, so that what
  // they write to the same sectors of memory meets in the cache.
  uint32_t grouped_jobs;
  uint32_t grouped_blocks;  // of all groups
  Divisor group;            // blocks of a group
  Dtype dtype;              // dtype of the sums; a complex number is summed as two real ones
  // value of cells without a summand, repeated
  alignas(CombineTile::kGranule) uint8_t fill[CombineTile::kGranule];
  // If `failed` is not null and points to a nonzero word, received data is invalid: every
  // destination is filled with all-ones bytes, which is NaN in every floating-point type. May point
  // to host memory.
  const uint32_t* failed;
};

// Run thread `thread` of block `block`, with tables that it can read.
//
// Only bytes of destination cells are written, each by exactly one thread. Reads are of whole
// granules: two neighbours for each granule of the destination, but never beyond the first and the
// last cell of the row's view, so never outside the tensor.
GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, const CombineJob* jobs,
                                        const CombineView* views, uint32_t block, uint32_t thread);

}  // namespace gpudist

#include "core/combine_body.h"
