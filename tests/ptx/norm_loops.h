// A normalization by loops in float64, which judges the results of the kernels.
#pragma once

#include <string>
#include <vector>

#include "norm_case.h"

namespace gpudist::ptx {

class NormLoops {
 public:
  explicit NormLoops(const NormCase& given);

  // Return the first result in `memory` that is not near these, or an empty string. Everything but
  // the sums follows from the totals there.
  std::string compare(const Memories& memory);

 private:
  void run(const Memories& memory);

  const NormCase& given_;
  std::vector<double> sums_, y_, of_sums_, of_x_, of_weight_, of_bias_;
  double largest_term_ = 0;  // of the gradient of x, where its terms may cancel
};

}  // namespace gpudist::ptx
