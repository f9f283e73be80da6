// A normalization by loops in extended precision, which judges the results of the kernels.
#pragma once

#include <string>
#include <vector>

#include "norm_case.h"

namespace gpudist::ptx {

class NormLoops {
 public:
  explicit NormLoops(const NormCase& given);

  // Return the first result in `memory` that is not near these, or an empty string. Everything but
  // the sums follows from the shifts and totals there.
  std::string compare(const Memories& memory);

 private:
  using Real = long double;

  // Exact moments of the values of a statistic.
  struct Moments {
    Real count = 0, sum = 0, mean = 0;
    Real squares = 0;  // around the mean
  };

  // Call `add(moments, x)` for every cell.
  template <class Add>
  void each_cell(const Add& add);
  // What was subtracted from the values of a statistic before they were summed.
  Real base(const Memories& memory, size_t statistic) const;
  std::string compare_sums(const Memories& memory) const;
  void run(const Memories& memory);

  const NormCase& given_;
  std::vector<Moments> moments_;
  std::vector<double> y_, of_sums_, of_x_, of_weight_, of_bias_;
  double largest_term_ = 0;  // of the gradient of x, where its terms may cancel
  double largest_mean_ = 0;  // of what was summed
};

}  // namespace gpudist::ptx
