// Normalization of lines compared with plain loops in float64, for lengths near the number of
// lanes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "core/norm_lines.h"
#include "test.h"

namespace {

using gpudist::NormLayout;
using gpudist::NormLines;

std::mt19937_64 random_bits(13);

std::vector<float> random_items(int64_t count, double mean) {
  std::normal_distribution<double> normal(mean, 1);
  std::vector<float> items(count);
  for (float& item : items) item = static_cast<float>(normal(random_bits));
  return items;
}

bool are_close(const std::vector<float>& found, const std::vector<double>& expected) {
  double largest = 1, error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i]));
    error = std::max(error, std::fabs(static_cast<double>(found[i]) - expected[i]));
  }
  return error <= 2e-6 * largest;
}

// Each line has its own statistics; parameters belong to channels or to cells.
void check_lines(int64_t lines, int64_t channels, int64_t cells, bool of_cells,
                 bool subtracts_mean) {
  const int64_t parts = subtracts_mean ? 2 : 1, count = of_cells ? cells : channels;
  const double eps = 1e-3, mean_of_all = subtracts_mean ? 100 : 0;
  const NormLines norm(
      {lines, channels, cells, {}, lines, double(cells), eps, subtracts_mean, of_cells});
  const std::vector<float> x = random_items(lines * cells, mean_of_all);
  const std::vector<float> gradient = random_items(lines * cells, 0);
  const std::vector<float> weight = random_items(count, 0), bias = random_items(count, 0);

  std::vector<double> totals(parts * lines), of_totals(parts * lines);
  std::vector<float> y(lines * cells), of_x(lines * cells), of_weight(count), of_bias(count);
  norm.sums(x.data(), totals.data());
  norm.normalize(x.data(), totals.data(), weight.data(), bias.data(), y.data());
  norm.gradient_sums(gradient.data(), x.data(), totals.data(), weight.data(), of_totals.data(),
                     of_weight.data(), of_bias.data());
  norm.gradient(gradient.data(), x.data(), totals.data(), of_totals.data(), weight.data(),
                of_x.data());

  std::vector<double> y_wanted(lines * cells), x_wanted(lines * cells);
  std::vector<double> weight_wanted(count), bias_wanted(count);
  for (int64_t line = 0; line < lines; ++line) {
    const int64_t start = line * cells;
    double mean = 0, variance = 0, first = 0, second = 0;
    for (int64_t i = 0; subtracts_mean && i < cells; ++i) mean += double(x[start + i]) / cells;
    for (int64_t i = 0; i < cells; ++i) variance += std::pow(x[start + i] - mean, 2) / cells;
    const double inverse = 1 / std::sqrt(variance + eps);
    const auto parameter = [&](int64_t i) { return of_cells ? i : line % channels; };
    for (int64_t i = 0; i < cells; ++i) {
      const double z = (x[start + i] - mean) * inverse, g = gradient[start + i];
      const int64_t p = parameter(i);
      y_wanted[start + i] = z * weight[p] + bias[p];
      weight_wanted[p] += g * z;
      bias_wanted[p] += g;
      first += subtracts_mean ? g * weight[p] / cells : 0;
      second += g * weight[p] * z / cells;
    }
    for (int64_t i = 0; i < cells; ++i) {
      const double z = (x[start + i] - mean) * inverse, g = gradient[start + i];
      x_wanted[start + i] = inverse * (g * weight[parameter(i)] - first - z * second);
    }
  }
  // The variance of a single value is far below the rounding of its square.
  const bool is_exact = cells > 1;
  CHECK(!is_exact || are_close(y, y_wanted));
  CHECK(!is_exact || are_close(of_x, x_wanted));
  CHECK(!is_exact || are_close(of_weight, weight_wanted));
  CHECK(are_close(of_bias, bias_wanted));
}

}  // namespace

void test_norm_lines() {
  for (const int64_t cells : {1, 3, 4, 7, 8, 9, 31, 32, 33, 63, 100, 2047, 2048, 2049, 5000}) {
    for (const bool of_cells : {false, true}) {
      for (const bool subtracts_mean : {false, true}) {
        check_lines(6, 3, cells, of_cells, subtracts_mean);
      }
    }
  }
  check_lines(129, 1, 40, true, true);
  check_lines(128, 1, 40, true, false);
}
