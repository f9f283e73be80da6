#include "core/norm_lines.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/lane_sums.h"

namespace gpudist {

namespace {

// Cells per chunk. A chunk is summed in the block's dtype, chunks are added in float64. A chunk
// fits in the L1 cache, so reading it a second time is almost free.
constexpr int64_t kChunk = 2048;
// Number of lines whose cells are summed in the block's dtype before the sum is added in float64.
constexpr int64_t kLinesTogether = 64;

// Statistics of a line. `mean` is `shift + error`, where `shift` is the mean rounded to T.
template <class T>
struct Moments {
  double mean = 0;
  double inverse;
  T shift = 0;
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
      shift = static_cast<T>(mean);
      error = mean - static_cast<double>(shift);
    }
    inverse = 1 / std::sqrt(variance + layout.eps);
  }
};

int64_t statistic_of(const NormLayout& layout, int64_t line) {
  return layout.statistic_of.empty() ? line : layout.statistic_of[line];
}

struct SumLines {
  template <class T>
  GPUDIST_INLINE static void run(const NormLayout& layout, const T* x, double* sums) {
    const int64_t parts = layout.subtracts_mean ? 2 : 1;
    std::fill_n(sums, parts * layout.statistics, 0.0);
    for (int64_t line = 0; line < layout.lines; ++line) {
      double* own = sums + parts * statistic_of(layout, line);
      for (int64_t start = 0; start < layout.cells; start += kChunk) {
        const T* chunk = x + line * layout.cells + start;
        const int64_t count = std::min(kChunk, layout.cells - start);
        // Squares of `x - mean` are more precise than squares of `x`.
        double shift = 0;
        if (layout.subtracts_mean) {
          const double mean = sums_of<T>(ShiftedTerms<T>{chunk, 0}, count).first / count;
          shift = static_cast<double>(static_cast<T>(mean));
        }
        const LineSums found = sums_of<T>(ShiftedTerms<T>{chunk, static_cast<T>(shift)}, count);
        const double moved = static_cast<double>(count) * shift;
        if (layout.subtracts_mean) own[0] += found.first + moved;
        own[parts - 1] += found.second + shift * (2 * found.first + moved);
      }
    }
  }
};

struct NormalizeLines {
  template <class T>
  GPUDIST_INLINE static void run(const NormLayout& layout, const T* all_x, const double* totals,
                                 const T* weight, const T* bias, T* all_y) {
    for (int64_t line = 0; line < layout.lines; ++line) {
      const T* x = all_x + line * layout.cells;
      T* __restrict y = all_y + line * layout.cells;
      const Moments<T> moments(layout, totals, statistic_of(layout, line));
      double factor = moments.inverse, offset = -moments.error * factor;
      if (!layout.parameters_of_cells) {
        const int64_t channel = line % layout.channels;
        if (weight != nullptr) {
          factor *= static_cast<double>(weight[channel]);
          offset *= static_cast<double>(weight[channel]);
        }
        if (bias != nullptr) offset += static_cast<double>(bias[channel]);
      }
      const T shift = moments.shift, scale = static_cast<T>(factor), add = static_cast<T>(offset);
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
template <class T>
GPUDIST_INLINE void add_products(const T* gradient, const T* x, const T* weight, int64_t cells,
                                 T shift, LineSums& sums) {
  for (int64_t start = 0; start < cells; start += kChunk) {
    const int64_t count = std::min(kChunk, cells - start);
    const T *of = gradient + start, *from = x + start;
    const LineSums found =
        weight != nullptr ? sums_of<T>(Products<T, true>{of, from, weight + start, shift}, count)
                          : sums_of<T>(Products<T, false>{of, from, nullptr, shift}, count);
    sums.first += found.first;
    sums.second += found.second;
  }
}

// Sums over all lines for each cell: the gradients of per-cell parameters.
template <class T>
struct CellSums {
  T weights[kChunk], biases[kChunk];
  double all_weights[kChunk] = {}, all_biases[kChunk] = {};

  GPUDIST_INLINE void clear(int64_t count) {
    std::fill_n(weights, count, T(0));
    std::fill_n(biases, count, T(0));
  }
  GPUDIST_INLINE void add(const T* gradient, const T* x, int64_t count, const Moments<T>& moments) {
    const T scale = static_cast<T>(moments.inverse), shift = moments.shift;
    const T add = static_cast<T>(-moments.error * moments.inverse);
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
  template <class T>
  GPUDIST_INLINE static void run(const NormLayout& layout, const T* gradient, const T* x,
                                 const double* totals, const T* weight, double* of_sums,
                                 T* of_weight, T* of_bias) {
    std::vector<LineSums> of_lines(layout.lines);
    if (layout.parameters_of_cells) {
      by_cells(layout, gradient, x, totals, weight, of_lines, of_weight, of_bias);
      weight = nullptr;
    } else {
      for (int64_t line = 0; line < layout.lines; ++line) {
        const Moments<T> moments(layout, totals, statistic_of(layout, line));
        const int64_t start = line * layout.cells;
        add_products<T>(gradient + start, x + start, nullptr, layout.cells, moments.shift,
                        of_lines[line]);
      }
    }
    const int64_t parts = layout.subtracts_mean ? 2 : 1;
    std::fill_n(of_sums, parts * layout.statistics, 0.0);
    std::vector<LineSums> of_channels(layout.channels);
    for (int64_t line = 0; line < layout.lines; ++line) {
      const int64_t statistic = statistic_of(layout, line), channel = line % layout.channels;
      const Moments<T> moments(layout, totals, statistic);
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
      if (of_weight != nullptr) of_weight[channel] = static_cast<T>(of_channels[channel].second);
      if (of_bias != nullptr) of_bias[channel] = static_cast<T>(of_channels[channel].first);
    }
  }

  // One chunk of all lines at a time, so that sums over lines and over cells take one pass.
  template <class T>
  GPUDIST_INLINE static void by_cells(const NormLayout& layout, const T* all_gradients,
                                      const T* all_x, const double* totals, const T* weight,
                                      std::vector<LineSums>& of_lines, T* of_weight, T* of_bias) {
    const bool learns = of_weight != nullptr || of_bias != nullptr;
    for (int64_t start = 0; start < layout.cells; start += kChunk) {
      const int64_t count = std::min(kChunk, layout.cells - start);
      const T* factors = weight == nullptr ? nullptr : weight + start;
      CellSums<T> cells;
      for (int64_t line = 0; line < layout.lines; ++line) {
        const Moments<T> moments(layout, totals, statistic_of(layout, line));
        const T* x = all_x + line * layout.cells + start;
        const T* gradient = all_gradients + line * layout.cells + start;
        add_products<T>(gradient, x, factors, count, moments.shift, of_lines[line]);
        if (!learns) continue;
        if (line % kLinesTogether == 0) cells.clear(count);
        cells.add(gradient, x, count, moments);
        if ((line + 1) % kLinesTogether == 0 || line + 1 == layout.lines) cells.widen(count);
      }
      for (int64_t i = 0; i < count; ++i) {
        if (of_weight != nullptr) of_weight[start + i] = static_cast<T>(cells.all_weights[i]);
        if (of_bias != nullptr) of_bias[start + i] = static_cast<T>(cells.all_biases[i]);
      }
    }
  }
};

struct GradientOfLines {
  template <class T>
  GPUDIST_INLINE static void run(const NormLayout& layout, const T* all_gradients, const T* all_x,
                                 const double* totals, const double* of_totals, const T* weight,
                                 T* of_all_x) {
    const int64_t parts = layout.subtracts_mean ? 2 : 1, cells = layout.cells;
    const bool weighs_cells = layout.parameters_of_cells && weight != nullptr;
    for (int64_t line = 0; line < layout.lines; ++line) {
      const int64_t statistic = statistic_of(layout, line);
      const Moments<T> moments(layout, totals, statistic);
      double factor = moments.inverse;
      if (weight != nullptr && !weighs_cells) {
        factor *= static_cast<double>(weight[line % layout.channels]);
      }
      const double* own = of_totals + parts * statistic;
      const double slope = 2 * own[parts - 1];
      double offset = slope * static_cast<double>(moments.shift);
      if (parts == 2) offset += own[0];
      const T scale = static_cast<T>(factor), times = static_cast<T>(slope);
      const T shift = moments.shift, add = static_cast<T>(offset);
      const T* x = all_x + line * cells;
      const T* gradient = all_gradients + line * cells;
      T* __restrict of_x = of_all_x + line * cells;
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

template <class T>
const T* items(const void* address) {
  return static_cast<const T*>(address);
}

template <class T>
T* items(void* address) {
  return static_cast<T*>(address);
}

#if defined(__x86_64__)
const bool has_wide_lanes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");

// The same kernel compiled for AVX2 registers.
template <class Kernel, class T, class... Arguments>
[[gnu::target("avx2,fma")]] void run_wide(const NormLayout& layout, Arguments... arguments) {
  Kernel::template run<T>(layout, arguments...);
}
#endif

template <class Kernel, class T, class... Arguments>
void run(const NormLayout& layout, Arguments... arguments) {
#if defined(__x86_64__)
  if (has_wide_lanes) return run_wide<Kernel, T>(layout, arguments...);
#endif
  Kernel::template run<T>(layout, arguments...);
}

}  // namespace

NormLines::NormLines(NormLayout layout) : layout_(std::move(layout)) {
  if (layout_.dtype != Dtype::kFloat32 && layout_.dtype != Dtype::kFloat64) {
    throw TransportError("lines are normalized in float32 or float64");
  }
}

// Call `function` with a value of the block's dtype.
template <class Function>
void NormLines::with_items(const Function& function) const {
  if (layout_.dtype == Dtype::kFloat32) return function(float());
  function(double());
}

void NormLines::sums(const void* x, double* sums) const {
  with_items([&](auto item) {
    using T = decltype(item);
    run<SumLines, T>(layout_, items<T>(x), sums);
  });
}

void NormLines::normalize(const void* x, const double* totals, const void* weight, const void* bias,
                          void* y) const {
  with_items([&](auto item) {
    using T = decltype(item);
    run<NormalizeLines, T>(layout_, items<T>(x), totals, items<T>(weight), items<T>(bias),
                           items<T>(y));
  });
}

void NormLines::gradient_sums(const void* gradient, const void* x, const double* totals,
                              const void* weight, double* of_sums, void* of_weight,
                              void* of_bias) const {
  with_items([&](auto item) {
    using T = decltype(item);
    run<SumGradients, T>(layout_, items<T>(gradient), items<T>(x), totals, items<T>(weight),
                         of_sums, items<T>(of_weight), items<T>(of_bias));
  });
}

void NormLines::gradient(const void* gradient, const void* x, const double* totals,
                         const double* of_totals, const void* weight, void* of_x) const {
  with_items([&](auto item) {
    using T = decltype(item);
    run<GradientOfLines, T>(layout_, items<T>(gradient), items<T>(x), totals, of_totals,
                            items<T>(weight), items<T>(of_x));
  });
}

}  // namespace gpudist
