#include "core/norm_lines.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/lane_sums.h"

namespace gpudist {

namespace {

// Cells per chunk. A chunk is summed in float32, chunks are added in float64. A chunk
// fits in the L1 cache, so reading it a second time is almost free.
constexpr int64_t kChunk = 2048;
// Number of lines whose cells are summed in float32 before the sum is added in float64.
constexpr int64_t kLinesTogether = 64;

// Statistics of a line. `mean` is `shift + error`, where `shift` is the mean rounded to float32.
struct Moments {
  double mean = 0;
  double inverse;
  float shift = 0;
  double error = 0;

  Moments(const NormLayout& layout, const double* totals, int64_t statistic) {
    const int64_t sums = layout.subtracts_mean ? 2 : 1;
    const double* own = totals + sums * statistic;
    double variance = own[sums - 1] / layout.count;
    if (layout.subtracts_mean) {
      mean = own[0] / layout.count;
      variance -= mean * mean;
      // Rounding can make the variance of equal values far from zero negative.
      if (variance < 0) variance = 0;
      shift = static_cast<float>(mean);
      error = mean - static_cast<double>(shift);
    }
    inverse = 1 / std::sqrt(variance + layout.eps);
  }
};

int64_t statistic_of(const NormLayout& layout, int64_t line) {
  return layout.statistic_of.empty() ? line : layout.statistic_of[line];
}

struct SumLines {
  GPUDIST_INLINE static void run(const NormLayout& layout, const float* x, double* sums) {
    const int64_t parts = layout.subtracts_mean ? 2 : 1;
    std::fill_n(sums, parts * layout.statistics, 0.0);
    for (int64_t line = 0; line < layout.lines; ++line) {
      double* own = sums + parts * statistic_of(layout, line);
      for (int64_t start = 0; start < layout.cells; start += kChunk) {
        const float* chunk = x + line * layout.cells + start;
        const int64_t count = std::min(kChunk, layout.cells - start);
        // Squares of `x - mean` are more precise than squares of `x`.
        double shift = 0;
        if (layout.subtracts_mean) {
          const double mean = sums_of<float>(ShiftedTerms<float>{chunk, 0}, count).first / count;
          shift = static_cast<double>(static_cast<float>(mean));
        }
        const LineSums found =
            sums_of<float>(ShiftedTerms<float>{chunk, static_cast<float>(shift)}, count);
        const double moved = static_cast<double>(count) * shift;
        if (layout.subtracts_mean) own[0] += found.first + moved;
        own[parts - 1] += found.second + shift * (2 * found.first + moved);
      }
    }
  }
};

struct NormalizeLines {
  GPUDIST_INLINE static void run(const NormLayout& layout, const float* all_x, const double* totals,
                                 const float* weight, const float* bias, float* all_y) {
    for (int64_t line = 0; line < layout.lines; ++line) {
      const float* x = all_x + line * layout.cells;
      float* __restrict y = all_y + line * layout.cells;
      const Moments moments(layout, totals, statistic_of(layout, line));
      double factor = moments.inverse, offset = -moments.error * factor;
      if (!layout.parameters_of_cells) {
        const int64_t channel = line % layout.channels;
        if (weight != nullptr) {
          factor *= static_cast<double>(weight[channel]);
          offset *= static_cast<double>(weight[channel]);
        }
        if (bias != nullptr) offset += static_cast<double>(bias[channel]);
      }
      const float shift = moments.shift, scale = static_cast<float>(factor),
                  add = static_cast<float>(offset);
      const int64_t cells = layout.cells;
      if (!layout.parameters_of_cells || (weight == nullptr && bias == nullptr)) {
        for (int64_t i = 0; i < cells; ++i) y[i] = (x[i] - shift) * scale + add;
      } else if (bias == nullptr) {
        for (int64_t i = 0; i < cells; ++i) y[i] = ((x[i] - shift) * scale + add) * weight[i];
      } else if (weight == nullptr) {
        for (int64_t i = 0; i < cells; ++i) y[i] = ((x[i] - shift) * scale + add) + bias[i];
      } else {
        for (int64_t i = 0; i < cells; ++i) {
          y[i] = ((x[i] - shift) * scale + add) * weight[i] + bias[i];
        }
      }
    }
  }
};

// Sum over cells of a line the gradient, and its product with `x - shift`.
GPUDIST_INLINE void add_products(const float* gradient, const float* x, const float* weight,
                                 int64_t cells, float shift, LineSums& sums) {
  for (int64_t start = 0; start < cells; start += kChunk) {
    const int64_t count = std::min(kChunk, cells - start);
    const float *of = gradient + start, *from = x + start;
    const LineSums found =
        weight != nullptr
            ? sums_of<float>(Products<float, true>{of, from, weight + start, shift}, count)
            : sums_of<float>(Products<float, false>{of, from, nullptr, shift}, count);
    sums.first += found.first;
    sums.second += found.second;
  }
}

// Sums over all lines for each cell: the gradients of per-cell parameters.
struct CellSums {
  float weights[kChunk], biases[kChunk];
  double all_weights[kChunk] = {}, all_biases[kChunk] = {};

  GPUDIST_INLINE void clear(int64_t count) {
    std::fill_n(weights, count, float(0));
    std::fill_n(biases, count, float(0));
  }
  GPUDIST_INLINE void add(const float* gradient, const float* x, int64_t count,
                          const Moments& moments) {
    const float scale = static_cast<float>(moments.inverse), shift = moments.shift;
    const float add = static_cast<float>(-moments.error * moments.inverse);
    for (int64_t i = 0; i < count; ++i) {
      weights[i] += gradient[i] * ((x[i] - shift) * scale + add);
      biases[i] += gradient[i];
    }
  }
  GPUDIST_INLINE void widen(int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      all_weights[i] += static_cast<double>(weights[i]);
      all_biases[i] += static_cast<double>(biases[i]);
    }
  }
};

struct SumGradients {
  GPUDIST_INLINE static void run(const NormLayout& layout, const float* gradient, const float* x,
                                 const double* totals, const float* weight, double* of_sums,
                                 float* of_weight, float* of_bias) {
    std::vector<LineSums> of_lines(layout.lines);
    if (layout.parameters_of_cells) {
      by_cells(layout, gradient, x, totals, weight, of_lines, of_weight, of_bias);
      weight = nullptr;
    } else {
      for (int64_t line = 0; line < layout.lines; ++line) {
        const Moments moments(layout, totals, statistic_of(layout, line));
        const int64_t start = line * layout.cells;
        add_products(gradient + start, x + start, nullptr, layout.cells, moments.shift,
                     of_lines[line]);
      }
    }
    const int64_t parts = layout.subtracts_mean ? 2 : 1;
    std::fill_n(of_sums, parts * layout.statistics, 0.0);
    std::vector<LineSums> of_channels(layout.channels);
    for (int64_t line = 0; line < layout.lines; ++line) {
      const int64_t statistic = statistic_of(layout, line), channel = line % layout.channels;
      const Moments moments(layout, totals, statistic);
      const double inverse = moments.inverse;
      const double factor = weight != nullptr ? static_cast<double>(weight[channel]) : 1;
      const double first = of_lines[line].first;
      const double second = of_lines[line].second - moments.error * first;
      of_channels[channel].first += first;
      of_channels[channel].second += second * inverse;
      const double of_square = -0.5 * inverse * inverse * inverse * factor * second / layout.count;
      double* own = of_sums + parts * statistic;
      own[parts - 1] += of_square;
      if (!layout.subtracts_mean) continue;
      own[0] -= inverse * factor * first / layout.count + 2 * moments.mean * of_square;
    }
    if (layout.parameters_of_cells) return;
    for (int64_t channel = 0; channel < layout.channels; ++channel) {
      if (of_weight != nullptr)
        of_weight[channel] = static_cast<float>(of_channels[channel].second);
      if (of_bias != nullptr) of_bias[channel] = static_cast<float>(of_channels[channel].first);
    }
  }

  // One chunk of all lines at a time, so that sums over lines and over cells take one pass.
  GPUDIST_INLINE static void by_cells(const NormLayout& layout, const float* all_gradients,
                                      const float* all_x, const double* totals, const float* weight,
                                      std::vector<LineSums>& of_lines, float* of_weight,
                                      float* of_bias) {
    const bool learns = of_weight != nullptr || of_bias != nullptr;
    for (int64_t start = 0; start < layout.cells; start += kChunk) {
      const int64_t count = std::min(kChunk, layout.cells - start);
      const float* factors = weight == nullptr ? nullptr : weight + start;
      CellSums cells;
      for (int64_t line = 0; line < layout.lines; ++line) {
        const Moments moments(layout, totals, statistic_of(layout, line));
        const float* x = all_x + line * layout.cells + start;
        const float* gradient = all_gradients + line * layout.cells + start;
        add_products(gradient, x, factors, count, moments.shift, of_lines[line]);
        if (!learns) continue;
        if (line % kLinesTogether == 0) cells.clear(count);
        cells.add(gradient, x, count, moments);
        if ((line + 1) % kLinesTogether == 0 || line + 1 == layout.lines) cells.widen(count);
      }
      for (int64_t i = 0; i < count; ++i) {
        if (of_weight != nullptr) of_weight[start + i] = static_cast<float>(cells.all_weights[i]);
        if (of_bias != nullptr) of_bias[start + i] = static_cast<float>(cells.all_biases[i]);
      }
    }
  }
};

struct GradientOfLines {
  GPUDIST_INLINE static void run(const NormLayout& layout, const float* all_gradients,
                                 const float* all_x, const double* totals, const double* of_totals,
                                 const float* weight, float* of_all_x) {
    const int64_t parts = layout.subtracts_mean ? 2 : 1, cells = layout.cells;
    const bool weighs_cells = layout.parameters_of_cells && weight != nullptr;
    for (int64_t line = 0; line < layout.lines; ++line) {
      const int64_t statistic = statistic_of(layout, line);
      const Moments moments(layout, totals, statistic);
      double factor = moments.inverse;
      if (weight != nullptr && !weighs_cells) {
        factor *= static_cast<double>(weight[line % layout.channels]);
      }
      const double* own = of_totals + parts * statistic;
      const double slope = 2 * own[parts - 1];
      double offset = slope * static_cast<double>(moments.shift);
      if (parts == 2) offset += own[0];
      const float scale = static_cast<float>(factor), times = static_cast<float>(slope);
      const float shift = moments.shift, add = static_cast<float>(offset);
      const float* x = all_x + line * cells;
      const float* gradient = all_gradients + line * cells;
      float* __restrict of_x = of_all_x + line * cells;
      if (weighs_cells) {
        for (int64_t i = 0; i < cells; ++i) {
          of_x[i] = gradient[i] * weight[i] * scale + ((x[i] - shift) * times + add);
        }
      } else {
        for (int64_t i = 0; i < cells; ++i) {
          of_x[i] = gradient[i] * scale + ((x[i] - shift) * times + add);
        }
      }
    }
  }
};

#if defined(__x86_64__)
const bool has_wide_lanes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");

// The same kernel compiled for AVX2 registers.
template <class Kernel, class... Arguments>
[[gnu::target("avx2,fma")]] void run_wide(const NormLayout& layout, Arguments... arguments) {
  Kernel::run(layout, arguments...);
}
#endif

template <class Kernel, class... Arguments>
void run(const NormLayout& layout, Arguments... arguments) {
#if defined(__x86_64__)
  if (has_wide_lanes) return run_wide<Kernel>(layout, arguments...);
#endif
  Kernel::run(layout, arguments...);
}

}  // namespace

NormLines::NormLines(NormLayout layout) : layout_(std::move(layout)) {}

void NormLines::sums(const float* x, double* sums) const {
  run<SumLines>(layout_, x, sums);
}

void NormLines::normalize(const float* x, const double* totals, const float* weight,
                          const float* bias, float* y) const {
  run<NormalizeLines>(layout_, x, totals, weight, bias, y);
}

void NormLines::gradient_sums(const float* gradient, const float* x, const double* totals,
                              const float* weight, double* of_sums, float* of_weight,
                              float* of_bias) const {
  run<SumGradients>(layout_, gradient, x, totals, weight, of_sums, of_weight, of_bias);
}

void NormLines::gradient(const float* gradient, const float* x, const double* totals,
                         const double* of_totals, const float* weight, float* of_x) const {
  run<GradientOfLines>(layout_, gradient, x, totals, of_totals, weight, of_x);
}

}  // namespace gpudist
