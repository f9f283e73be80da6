// The normalization of a block that lies in contiguous lines, in as few passes as there can be: one
// for the sums and one for the values, forward and backward.
#pragma once

#include <cstdint>
#include <vector>

#include "core/packing.h"

namespace gpudist {

// What all blocks of one shape have in common. Line `l` is one of channel `l % channels`.
struct NormLayout {
  Dtype dtype;  // float32 or float64: of the block, of its parameters and of their gradients
  int64_t lines;
  int64_t channels;
  int64_t cells;                      // of a line
  std::vector<int64_t> statistic_of;  // of each line; empty if each line has its own
  int64_t statistics;                 // how many there are
  double count;                       // how many values all workers average for one
  double eps;                         // added to the variance
  bool subtracts_mean;                // else values are divided by their root mean square
  bool parameters_of_cells;           // of each cell of a line, else one of each channel
};

// Sums are two float64 for each statistic, of values and of squares; without means only the latter.
// They are added up over workers between the calls. Pointers to parameters, and to their gradients,
// may be null: there is none, or it is not wanted.
class NormLines {
 public:
  explicit NormLines(NormLayout layout);

  void sums(const void* x, double* sums) const;
  void normalize(const void* x, const double* totals, const void* weight, const void* bias,
                 void* y) const;
  // Of the block's part in the sums, and of the parameters.
  void gradient_sums(const void* gradient, const void* x, const double* totals, const void* weight,
                     double* of_sums, void* of_weight, void* of_bias) const;
  // Of the block.
  void gradient(const void* gradient, const void* x, const double* totals, const double* of_totals,
                const void* weight, void* of_x) const;

 private:
  template <class Function>
  void with_items(const Function& function) const;

  NormLayout layout_;
};

}  // namespace gpudist
