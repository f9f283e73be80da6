#include "norm_loops.h"

#include <algorithm>
#include <cmath>

namespace gpudist::ptx {

namespace {

// Whether the largest error of results is small beside the largest expected number: `allowed` for
// float32.
std::string compare_part(const Memory& found, const std::vector<double>& expected, Dtype dtype,
                         double allowed, double largest) {
  double error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i]));
    const double difference =
        std::fabs(value_of(found, static_cast<int64_t>(i), dtype) - expected[i]);
    error = difference <= error ? error : difference;
  }
  if (dtype == Dtype::kBfloat16) allowed += 5e-3;
  if (dtype == Dtype::kFloat16) allowed += 6e-4;
  if (error <= allowed * largest) return "";
  return std::string(found.kind()) + ": an error of " + std::to_string(error / largest * 1e6) +
         " millionths";
}

}  // namespace

NormLoops::NormLoops(const NormCase& given) : given_(given) {
  moments_.resize(given_.statistics());
  each_cell([](Moments& own, Real) { ++own.count; });
  // The second time of values that are small if the mean is large.
  for (int i = 0; given_.shape.subtracts_mean && i < 2; ++i) {
    for (Moments& own : moments_) own.sum = 0;
    each_cell([](Moments& own, Real x) { own.sum += x - own.mean; });
    for (Moments& own : moments_) own.mean += own.count > 0 ? own.sum / own.count : 0;
  }
  each_cell([](Moments& own, Real x) { own.squares += (x - own.mean) * (x - own.mean); });
}

template <class Add>
void NormLoops::each_cell(const Add& add) {
  const NormShape& shape = given_.shape;
  for (int64_t o = 0; o < shape.outer; ++o) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      for (int64_t i = 0; i < shape.cells; ++i) {
        add(moments_[given_.statistic(o, c)],
            value_of(given_.memory[kX], given_.place(o, c, i), shape.dtype));
      }
    }
  }
}

NormLoops::Real NormLoops::base(const Memories& memory, size_t statistic) const {
  return given_.has_shifts ? memory[kShifts].numbers()[2 * statistic] / given_.shape.count : 0;
}

// Squares are judged around the mean, where a variance is: those of the values hide any error of
// the deviation if the mean is large.
std::string NormLoops::compare_sums(const Memories& memory) const {
  const Real precision = given_.shape.dtype == Dtype::kFloat64 ? 1e-14 : 1e-6;
  for (size_t s = 0; s < moments_.size(); ++s) {
    const Moments& own = moments_[s];
    const double* const sums = memory[kSums].numbers() + given_.width() * s;
    const Real mean = own.mean - base(memory, s), sum = own.count * mean;
    const Real rounding = 1e-15L * own.count * mean * mean;
    Real squares = sums[given_.width() - 1];
    if (given_.shape.subtracts_mean) {
      // The mean that follows from the sum, and what the squares then are.
      squares -= own.count > 0 ? Real{sums[0]} * sums[0] / own.count : 0;
      const Real allowed = precision * std::sqrt(own.count * own.squares);
      const Real of_loops = 1e-17L * own.count * std::fabs(own.mean);
      if (!(std::fabs(sums[0] - sum) <= allowed + of_loops + 1e-14L * std::fabs(sum))) {
        return "a sum is wrong";
      }
    }
    if (!(std::fabs(squares - own.squares) <= precision * own.squares + rounding)) {
      return "squares around the mean are " + std::to_string(squares) + ", not " +
             std::to_string(own.squares);
    }
  }
  return "";
}

void NormLoops::run(const Memories& memory) {
  const NormShape& shape = given_.shape;
  const int64_t width = given_.width();
  const double* const totals = memory[kTotals].numbers();
  const double* const of_totals = memory[kOfTotals].numbers();
  y_.resize(given_.items());
  of_x_.resize(given_.items());
  std::vector<Real> of_sums(width * given_.statistics());
  std::vector<Real> of_weight(given_.parameters()), of_bias(given_.parameters());
  for (int64_t o = 0; o < shape.outer; ++o) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      const int64_t s = given_.statistic(o, c);
      // Moments of what was summed: the values minus `from`.
      const Real from = base(memory, s);
      const Real mean = shape.subtracts_mean ? totals[width * s] / Real{shape.count} : 0;
      Real variance = totals[width * s + width - 1] / Real{shape.count} - mean * mean;
      if (shape.subtracts_mean) variance = std::max(Real{0}, variance);
      const Real inverse = 1 / std::sqrt(variance + shape.eps);
      largest_mean_ = std::max(largest_mean_, static_cast<double>(std::fabs(mean)));
      for (int64_t i = 0; i < shape.cells; ++i) {
        const int64_t at = given_.place(o, c, i), p = shape.walk == NormWalk::kCells ? i : c;
        const Real x = value_of(memory[kX], at, shape.dtype) - from;
        const Real g = value_of(memory[kGradient], at, shape.result_dtype);
        const Real w = given_.has_weight ? value_of(memory[kWeight], p, given_.parameter_dtype) : 1;
        const Real b = given_.has_bias ? value_of(memory[kBias], p, given_.parameter_dtype) : 0;
        const Real z = (x - mean) * inverse;
        y_[at] = static_cast<double>(z * w + b);
        of_weight[p] += g * z;
        of_bias[p] += g;
        const Real of_square =
            -0.5 * inverse * inverse * inverse * g * w * (x - mean) / shape.count;
        of_sums[width * s + width - 1] += of_square;
        if (shape.subtracts_mean) {
          of_sums[width * s] -= inverse * g * w / shape.count + 2 * mean * of_square;
        }
        const Real slope = 2 * of_totals[width * s + width - 1];
        const Real of_sum = shape.subtracts_mean ? of_totals[width * s] : 0;
        const Real term = g * w * inverse;
        largest_term_ = std::max(largest_term_, static_cast<double>(std::fabs(term)));
        of_x_[at] = static_cast<double>(term + slope * x + of_sum);
      }
    }
  }
  of_sums_.assign(of_sums.begin(), of_sums.end());
  of_weight_.assign(of_weight.begin(), of_weight.end());
  of_bias_.assign(of_bias.begin(), of_bias.end());
}

std::string NormLoops::compare(const Memories& memory) {
  run(memory);
  const double unit = given_.shape.dtype == Dtype::kFloat64 ? 1e-13 : 2e-6;
  // A variance near 0 carries roundings of the squared mean, beside eps.
  const double near = unit + largest_mean_ * largest_mean_ * 4e-16 / given_.shape.eps;
  std::string wrong = compare_sums(memory);
  const auto judge = [&](Part part, const std::vector<double>& expected, double allowed,
                         double largest = 1e-3) {
    if (!wrong.empty() || memory[part].bytes() == 0) return;
    wrong = compare_part(memory[part], expected, given_.dtype(part), allowed, largest);
  };
  judge(kY, y_, near);
  judge(kOfSums, of_sums_, near + unit);
  judge(kOfWeight, of_weight_, near + 5 * unit);
  judge(kOfBias, of_bias_, 5 * unit);
  judge(kOfX, of_x_, near, largest_term_);
  return wrong;
}

}  // namespace gpudist::ptx
