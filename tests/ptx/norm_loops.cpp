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
  each_cell([](Moments& own, double x) { ++own.count, own.sum += x; });
  for (Moments& own : moments_) {
    if (given_.shape.subtracts_mean && own.count > 0) own.mean = own.sum / own.count;
  }
  each_cell([](Moments& own, double x) { own.squares += (x - own.mean) * (x - own.mean); });
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

// Squares are judged around the mean, where a variance is: those of the values hide any error of
// the deviation if the mean is large.
std::string NormLoops::compare_sums(const Memory& found) const {
  for (size_t s = 0; s < moments_.size(); ++s) {
    const Moments& own = moments_[s];
    const double* const sums = found.numbers() + given_.width() * s;
    const double rounding = 1e-15 * own.count * own.mean * own.mean;
    double squares = sums[given_.width() - 1];
    if (given_.shape.subtracts_mean) {
      // The mean that follows from the sum, and what the squares then are.
      squares -= own.count > 0 ? sums[0] * sums[0] / own.count : 0;
      const double allowed = 1e-6 * std::sqrt(own.count * own.squares);
      const double error = std::fabs(sums[0] - own.sum);
      if (!(error <= allowed + 1e-14 * std::fabs(own.sum))) return "a sum is wrong";
    }
    if (!(std::fabs(squares - own.squares) <= 1e-6 * own.squares + rounding)) {
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
  of_sums_.assign(width * given_.statistics(), 0);
  of_weight_.assign(given_.parameters(), 0);
  of_bias_.assign(given_.parameters(), 0);
  for (int64_t o = 0; o < shape.outer; ++o) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      const int64_t s = given_.statistic(o, c);
      const double mean = shape.subtracts_mean ? totals[width * s] / shape.count : 0;
      double variance = totals[width * s + width - 1] / shape.count - mean * mean;
      if (shape.subtracts_mean) variance = std::max(0.0, variance);
      const double inverse = 1 / std::sqrt(variance + shape.eps);
      for (int64_t i = 0; i < shape.cells; ++i) {
        const int64_t at = given_.place(o, c, i), p = shape.walk == NormWalk::kCells ? i : c;
        const double x = value_of(memory[kX], at, shape.dtype);
        const double g = value_of(memory[kGradient], at, shape.result_dtype);
        const double w =
            given_.has_weight ? value_of(memory[kWeight], p, given_.parameter_dtype) : 1;
        const double b = given_.has_bias ? value_of(memory[kBias], p, given_.parameter_dtype) : 0;
        const double z = (x - mean) * inverse;
        y_[at] = z * w + b;
        of_weight_[p] += g * z;
        of_bias_[p] += g;
        const double of_square =
            -0.5 * inverse * inverse * inverse * g * w * (x - mean) / shape.count;
        of_sums_[width * s + width - 1] += of_square;
        if (shape.subtracts_mean) {
          of_sums_[width * s] -= inverse * g * w / shape.count + 2 * mean * of_square;
        }
        const double slope = 2 * of_totals[width * s + width - 1];
        largest_term_ = std::max(largest_term_, std::fabs(g * w * inverse));
        of_x_[at] = g * w * inverse + slope * x + (shape.subtracts_mean ? of_totals[width * s] : 0);
      }
    }
  }
}

std::string NormLoops::compare(const Memories& memory) {
  run(memory);
  // A variance near 0 carries roundings of the squared mean, beside eps.
  const double near = 2e-6 + given_.mean * given_.mean * 2e-16 / given_.shape.eps;
  std::string wrong = compare_sums(memory[kSums]);
  const auto judge = [&](Part part, const std::vector<double>& expected, double allowed,
                         double largest = 1e-3) {
    if (!wrong.empty() || memory[part].bytes() == 0) return;
    wrong = compare_part(memory[part], expected, given_.dtype(part), allowed, largest);
  };
  judge(kY, y_, near);
  judge(kOfSums, of_sums_, near + 2e-6);
  judge(kOfWeight, of_weight_, near + 1e-5);
  judge(kOfBias, of_bias_, 1e-5);
  judge(kOfX, of_x_, near, largest_term_);
  return wrong;
}

}  // namespace gpudist::ptx
