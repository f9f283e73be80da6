// Statistics of lines, and the factors that follow from them.
#pragma once

#include <cmath>

#include "core/failed_word.h"
#include "core/norm_cells.h"

namespace gpudist {
namespace norming {

// If parameters belong to cells, there is one channel, and a statistic for each outer index.
template <bool kOfCells = false>
GPUDIST_HOST_DEVICE inline uint32_t statistic_of(const NormArguments& a, uint32_t outer,
                                                 uint32_t channel) {
  if constexpr (kOfCells) return outer;
  const uint32_t shifted = channel + a.group_offset;
  const uint32_t group = a.group_size == 1 ? shifted : shifted / a.group_size;
  return a.shares_outer ? group : outer * a.groups + group;
}

// What is subtracted from cells of a statistic before they are summed.
template <class Value>
GPUDIST_HOST_DEVICE inline Value base_of(const NormArguments& a, uint32_t statistic) {
  if constexpr (kIsDouble<Value>) {
    return a.shifts == nullptr ? 0 : a.shifts[int64_t{2} * statistic] / a.count;
  } else {
    return 0;
  }
}

// Statistics of a line. The mean is `shift + error`, where `shift` is the mean rounded to float32,
// or what was subtracted from float64 cells.
template <class Value>
struct NormMoments {
  double mean = 0;  // of what was summed
  double variance;
  Value shift = 0;
  double error = 0;

  GPUDIST_HOST_DEVICE NormMoments(const NormArguments& a, uint32_t statistic) {
    const uint32_t width = a.subtracts_mean ? 2 : 1;
    double* const own = a.totals + int64_t{width} * statistic;
    double sum = own[0], squares = own[width - 1];
    // Passes that read them later do not look.
    if (is_set(a.failed)) own[0] = own[width - 1] = sum = squares = static_cast<double>(NAN);
    variance = squares / a.count;
    if (!a.subtracts_mean) return;
    mean = sum / a.count;
    variance = fma(-mean, mean, variance);
    // Rounding can make the variance of equal values far from zero negative.
    if (variance < 0) variance = 0;
    shift = kIsDouble<Value> ? base_of<Value>(a, statistic) : static_cast<Value>(mean);
    error = kIsDouble<Value> ? mean : mean - static_cast<double>(shift);
  }
  GPUDIST_HOST_DEVICE double inverse(double eps) const { return 1 / sqrt(variance + eps); }
};

// Factors of a line: `y = (x - shift) * scale + add`.
template <class Value>
struct LineFactors {
  Value shift, scale, add;

  template <bool kOfCells>
  GPUDIST_HOST_DEVICE static LineFactors of(const NormArguments& a, uint32_t outer,
                                            uint32_t channel) {
    const NormMoments<Value> moments(a, statistic_of<kOfCells>(a, outer, channel));
    double factor = moments.inverse(a.eps), offset = -moments.error * factor;
    if constexpr (!kOfCells) {
      if (a.weight != nullptr) {
        const double weight = value_at<Value>(a.weight, channel, a.parameter_dtype);
        factor *= weight;
        offset *= weight;
      }
      if (a.bias != nullptr) offset += value_at<Value>(a.bias, channel, a.parameter_dtype);
    }
    return {moments.shift, static_cast<Value>(factor), static_cast<Value>(offset)};
  }
};

// Factors of a line: the gradient is `g * scale + ((x - shift) * times + add)`.
template <class Value>
struct GradientFactors {
  Value shift, scale, add, times;

  template <bool kOfCells>
  GPUDIST_HOST_DEVICE static GradientFactors of(const NormArguments& a, uint32_t outer,
                                                uint32_t channel) {
    const uint32_t statistic = statistic_of<kOfCells>(a, outer, channel);
    const uint32_t width = a.subtracts_mean ? 2 : 1;
    const NormMoments<Value> moments(a, statistic);
    double factor = moments.inverse(a.eps);
    if (!kOfCells && a.weight != nullptr) {
      factor *= static_cast<double>(value_at<Value>(a.weight, channel, a.parameter_dtype));
    }
    const double* own = a.of_totals + int64_t{width} * statistic;
    const double slope = 2 * own[width - 1];
    // The sums are of cells minus their base, which is the shift or 0.
    double offset = kIsDouble<Value> ? 0 : slope * static_cast<double>(moments.shift);
    if (a.subtracts_mean) offset += own[0];
    return {moments.shift, static_cast<Value>(factor), static_cast<Value>(offset),
            static_cast<Value>(slope)};
  }
};

// What is subtracted from the cells of a line before they are summed.
template <class Value>
struct LineBase {
  Value base;

  template <bool kOfCells>
  GPUDIST_HOST_DEVICE static LineBase of(const NormArguments& a, uint32_t outer, uint32_t channel) {
    return {base_of<Value>(a, statistic_of(a, outer, channel))};
  }
};

// The shift of a line.
template <class Value>
struct LineShift {
  Value shift;

  template <bool kOfCells>
  GPUDIST_HOST_DEVICE static LineShift of(const NormArguments& a, uint32_t outer,
                                          uint32_t channel) {
    if (!a.subtracts_mean) return {0};
    const uint32_t statistic = statistic_of(a, outer, channel);
    if constexpr (kIsDouble<Value>) {
      return {base_of<Value>(a, statistic)};
    } else {
      return {static_cast<Value>(a.totals[int64_t{2} * statistic] / a.count)};
    }
  }
};

}  // namespace norming
}  // namespace gpudist
