// The one kernel: cells of a box become the sum, in order, of cells of other boxes. One summand is
// a copy (pack, unpack), none a constant. Host and device compilers share its body.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/box.h"
#include "core/half.h"
#include "core/packing.h"

namespace gpudist {

// What a view is a view of.
enum class Buffer : uint8_t { kInput, kOutput, kSent, kReceived };
constexpr int kBuffers = 4;

// Exact division of numbers below 2^31 by one that is known beforehand.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = uint32_t{1} << 31;
  uint8_t shift = 0;

  GPUDIST_HOST_DEVICE uint32_t quotient(uint32_t number) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(2 * number) * multiplier) >> 32) >> shift;
  }
};

// A job is a box as lines of rows of contiguous bytes. What is 16 bytes at an address that is a
// multiple of 16 is a granule. A thread makes a tile: one granule of the destination in each of
// some rows of a line.
struct CombineTile {
  static constexpr int kGranule = 16;
};

// Where the cells of a job lie in one buffer: bytes from the buffer's first, and bytes between
// neighbours. No stride is negative, so that all cells lie between `offset` and `stop`.
struct CombineView {
  static constexpr int kDims = kMaxDims - 1;

  int64_t offset;
  int64_t stop;
  int64_t step;
  int64_t reach;          // from a tile's column to the end of the granules of its last row
  int64_t tile_stride;    // between tiles of a line
  int64_t stride[kDims];  // between lines
  Buffer buffer;
};

struct CombineJob {
  static constexpr int kAlreadyThere = -1;  // summands: the cells have their values

  uint32_t tiles;  // in all
  uint32_t first_block;
  uint32_t blocks;
  uint32_t first_view;  // the destination, then the summands
  // Of one row, and of all rows of a line: less than rows times bytes where the last is cut short.
  int32_t row_bytes;
  int32_t line_bytes;
  // Of the rows between neighbouring tiles of a line, and between neighbouring rows of a tile.
  int32_t tile_bytes;
  int32_t step_bytes;
  int16_t summands;
  uint8_t rows;     // of a tile
  uint8_t dims;     // that count lines, outermost first
  uint8_t unit;     // up to 16: all addresses, strides and extents are multiples of so many bytes
  Divisor columns;  // tiles that lie along a row
  Divisor line;     // tiles that lie along a line
  Divisor shape[CombineView::kDims];
};

struct CombineArguments {
  static constexpr int kThreads = 256;

  char* buffers[kBuffers];
  // Where the launch is made: in memory of the device, or, if `inline_bytes` is not zero, in the
  // host's, one after the other from `jobs` on; then they travel with the launch.
  const CombineJob* jobs;
  const CombineView* views;
  uint32_t inline_bytes;
  uint32_t job_count;
  uint32_t blocks;
  Dtype dtype;  // of the sums; complex numbers are two real ones
  alignas(CombineTile::kGranule) uint8_t fill[CombineTile::kGranule];  // items of the constant
  // If not null and not zero, what has been received is worthless: all destinations become all-ones
  // bytes, which is not-a-number in every floating type. It may be in memory of the host.
  const uint32_t* failed;
};

// What thread `thread` of block `block` does, with tables that it can read.
//
// Only bytes of cells are written, and no byte by two threads. Whole granules are read: bytes
// beside a row, in a granule that has a cell of it, are read too and not used, but only between the
// first and the last cell of the row's view, which are in one tensor.
GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, const CombineJob* jobs,
                                        const CombineView* views, uint32_t block, uint32_t thread);

}  // namespace gpudist

#include "core/combine_body.h"
