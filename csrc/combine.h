// The one kernel: cells of a box become the sum, in order, of cells of other boxes. One summand is
// a copy (pack, unpack), none a constant. Host and device compilers share its body.
#pragma once

#include <cstdint>
#include <cstring>

#include "box.h"
#include "half.h"
#include "packing.h"

namespace gpudist {

// What a view is a view of.
enum class Buffer : uint8_t { kInput, kOutput, kSent, kReceived };
constexpr int kBuffers = 4;

// Exact division of numbers below 2^31 by one that is known beforehand.
struct Divisor {
  uint32_t value = 1;
  uint32_t multiplier = 0;  // 0: the divisor is one
  uint32_t shift = 0;

  GPUDIST_HOST_DEVICE uint32_t quotient(uint32_t number) const {
    if (multiplier == 0) return number;
    return static_cast<uint32_t>((static_cast<uint64_t>(number) * multiplier) >> 32) >> shift;
  }
};

// Where the cells of a job lie in one buffer: bytes from the buffer's first, and bytes between
// neighbours in each dim of the job.
struct CombineView {
  int64_t offset;
  int64_t stride[kMaxDims];
  Buffer buffer;
};

// Cells of one box, in lanes of lane_bytes, rows of row_lanes that are contiguous in every view.
struct CombineJob {
  static constexpr int kAlreadyThere = -1;  // summands: the cells have their values

  uint32_t lanes;  // in all
  uint32_t first_block;
  uint32_t first_view;  // the destination, then the summands
  int16_t summands;
  uint8_t lane_bytes;
  uint8_t dims;  // that count rows, outermost first
  Divisor row_lanes;
  Divisor shape[kMaxDims];
};

struct CombineArguments {
  static constexpr int kThreads = 256;
  static constexpr int kLanesPerThread = 4;
  static constexpr uint32_t kLanesPerBlock = kLanesPerThread * kThreads;

  char* buffers[kBuffers];
  // Where the launch is made: in memory of the device, or, if `inline_bytes` is not zero, in the
  // host's, one after the other from `jobs` on; then they travel with the launch.
  const CombineJob* jobs;
  const CombineView* views;
  uint32_t inline_bytes;
  uint32_t job_count;
  uint32_t blocks;
  Dtype dtype;  // of the sums; complex numbers are two real ones
  uint32_t item_bytes;
  uint8_t fill[16];  // items of the constant
  // If not null and not zero, what has been received is worthless: all destinations become all-ones
  // bytes, which is not-a-number in every floating type.
  const uint32_t* failed;
};

// What thread `thread` of block `block` does, with tables that it can read.
GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, const CombineJob* jobs,
                                        const CombineView* views, uint32_t block, uint32_t thread);

}  // namespace gpudist

#include "combine_body.h"
