// A random normalization: its shape, and the tensors of all passes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/norm_plan.h"

namespace gpudist::ptx {

// Memory of exactly `bytes` bytes, at an address that is a multiple of `alignment` alone. It begins
// at a multiple of 4 GiB, or contains one: 32 bits of its addresses may be zero, or wrap.
class Memory {
 public:
  // Bytes before and behind it that no launch may write.
  static constexpr int64_t kGap = 16;

  Memory(int64_t bytes, int64_t alignment, const char* kind);
  Memory(const Memory& other);
  Memory(Memory&& other) noexcept;
  Memory& operator=(const Memory&) = delete;
  ~Memory();

  char* data() { return begin_ + kGap; }
  const char* data() const { return begin_ + kGap; }
  double* numbers() { return reinterpret_cast<double*>(data()); }
  const double* numbers() const { return reinterpret_cast<const double*>(data()); }
  int64_t bytes() const { return bytes_; }
  const char* kind() const { return kind_; }

 private:
  void place();

  char* border_ = nullptr;  // the multiple of 4 GiB
  char* begin_ = nullptr;
  int64_t bytes_;
  int64_t shift_;
  const char* kind_;
};

using Memories = std::vector<Memory>;

// Index into the memories of a normalization.
enum Part {
  kX,
  kGradient,
  kY,
  kOfX,
  kSums,
  kShifts,
  kTotals,
  kOfSums,
  kOfTotals,
  kWorkspace,
  kWeight,
  kBias,
  kOfWeight,
  kOfBias,
  kRunningMean,
  kRunningVariance,
  kBatches,
  kFailedWord,
  kParts
};

// When the world fails, if kernels have a word to look at.
enum class Failure { kNoWord, kNever, kBeforeNormalize, kBeforeGradient };

struct NormCase {
  NormShape shape;
  Dtype parameter_dtype;
  Dtype running_dtype;
  bool has_weight, has_bias, has_running, is_cumulative;
  bool is_single;   // takes single cells
  bool is_far;      // a shape of more cells than 32 bits can number is tried instead
  bool has_shifts;  // the mean is moved first, and subtracted from what is summed
  bool is_extreme;  // results leave the range of normal 16-bit numbers, or are NaN
  Failure failure;
  double mean;
  Memories memory;
  int multiprocessors;

  Dtype dtype(Part part) const {
    switch (part) {
      case kX:
      case kOfX: return shape.dtype;
      case kGradient:
      case kY: return shape.result_dtype;
      case kWeight:
      case kBias:
      case kOfWeight:
      case kOfBias: return parameter_dtype;
      case kRunningMean:
      case kRunningVariance: return running_dtype;
      default: return Dtype::kFloat64;
    }
  }
  int64_t lines() const { return shape.outer * shape.channels; }
  int64_t items() const { return lines() * shape.cells; }
  int64_t statistics() const { return (shape.shares_outer ? 1 : shape.outer) * shape.groups; }
  int64_t width() const { return shape.subtracts_mean ? 2 : 1; }
  int64_t parameters() const {
    return shape.walk == NormWalk::kCells ? shape.cells : shape.channels;
  }
  int64_t statistic(int64_t outer, int64_t channel) const {
    const int64_t group = (channel + shape.group_offset) / shape.group_size;
    return shape.shares_outer ? group : outer * shape.groups + group;
  }
  int64_t place(int64_t outer, int64_t channel, int64_t cell) const {
    return shape.walk == NormWalk::kColumns
               ? (outer * shape.cells + cell) * shape.channels + channel
               : (outer * shape.channels + channel) * shape.cells + cell;
  }
};

void put_item(char* to, int64_t item, Dtype dtype, double value);
double item_of(const char* from, int64_t item, Dtype dtype);
double value_of(const Memory& memory, int64_t item, Dtype dtype);

// Normalization number `index`; most are small. Draws from `random_bits`.
NormCase random_norm(uint64_t index);

// Run one block of threads of a call on the host. Compiling the bodies takes long: once is enough.
void run_on_host(const NormCall& call, uint32_t block);

// Run some blocks of threads of each pass over a block of far more cells; returns the first error.
std::string run_far_norm(const NormShape& like, Dtype parameter_dtype, bool is_single);

}  // namespace gpudist::ptx
