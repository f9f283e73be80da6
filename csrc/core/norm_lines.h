// Normalization of a float32 block stored as contiguous lines. Forward and backward take two passes
// each: one for the sums, one for the values.
#pragma once

#include <cstdint>
#include <vector>

namespace gpudist {

// Properties shared by all blocks of one shape. Line `l` belongs to channel `l % channels`.
struct NormLayout {
  int64_t lines;
  int64_t channels;
  int64_t cells;  // in a line
  // index for each line; empty if each line has its own statistic
  std::vector<int64_t> statistic_of;
  int64_t statistics;   // number of statistics
  double count;         // number of values per statistic over all workers
  double eps;           // added to the variance
  bool subtracts_mean;  // otherwise values are divided by their root mean square
  // one parameter for each cell of a line, otherwise one for each channel
  bool parameters_of_cells;
};

// Each statistic has two float64 sums, of values and of squares; without subtracts_mean only the
// latter. The caller adds them up over workers between the calls. A pointer to a parameter may be
// null if there is none, a pointer to a gradient if it is not needed.
class NormLines {
 public:
  explicit NormLines(NormLayout layout);

  void sums(const float* x, double* sums) const;
  void normalize(const float* x, const double* totals, const float* weight, const float* bias,
                 float* y) const;
  // Gradients of this block's sums and of the parameters.
  void gradient_sums(const float* gradient, const float* x, const double* totals,
                     const float* weight, double* of_sums, float* of_weight, float* of_bias) const;
  // Gradient of the block.
  void gradient(const float* gradient, const float* x, const double* totals,
                const double* of_totals, const float* weight, float* of_x) const;

 private:
  NormLayout layout_;
};

}  // namespace gpudist
