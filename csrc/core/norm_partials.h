// Sums over the partial sums of parts of lines.
#pragma once

#include "core/norm_statistics.h"
#include "core/norm_sums.h"

namespace gpudist {
namespace norming {

// Partial sums of a statistic: those of all parts of a range of channels, of one or all outer
// indices.
struct StatisticPartials {
  uint32_t first_outer, outers, first_channel, channels;

  GPUDIST_HOST_DEVICE StatisticPartials(const NormArguments& a, uint32_t statistic) {
    first_outer = a.shares_outer ? 0 : statistic / a.groups;
    outers = a.shares_outer ? a.outer : 1;
    const uint32_t group = a.shares_outer ? statistic : statistic - first_outer * a.groups;
    const int64_t begin = int64_t{group} * a.group_size - a.group_offset;
    first_channel = within(begin, a.channels);
    channels = within(begin + a.group_size, a.channels) - first_channel;
  }

 private:
  GPUDIST_HOST_DEVICE static uint32_t within(int64_t number, uint32_t most) {
    return static_cast<uint32_t>(number < 0 ? 0 : number < most ? number : most);
  }
};

GPUDIST_HOST_DEVICE inline uint32_t statistics_of(const NormArguments& a) {
  return a.shares_outer ? a.groups : a.outer * a.groups;
}

// Call `add(outer, number, first, second)` for every `lanes`-th of `count` pairs of partials of
// each of `outers` outer indices, which are `pitch` pairs apart.
template <class Add>
GPUDIST_HOST_DEVICE inline void each_partial(const double* partials, uint32_t outers,
                                             uint32_t pitch, uint32_t count, uint32_t lane,
                                             uint32_t lanes, const Add& add) {
  GPUDIST_NOT_UNROLLED
  for (uint32_t i = lane; i < outers * count; i += lanes) {
    const uint32_t outer = outers == 1 ? 0 : i / count, number = i - outer * count;
    const double* const from = partials + 2 * (int64_t{outer} * pitch + number);
    add(outer, number, from[0], from[1]);
  }
}

struct FinishSums {
  using Shared = Reduction<2>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    const uint32_t lanes = a.grid.lanes;
    const uint32_t first = block * (kThreads / lanes);
    threads([&](uint32_t thread) {
      const uint32_t statistic = first + thread / lanes;
      NormSums sums;
      if (statistic < statistics_of(a)) {
        const StatisticPartials of(a, statistic);
        const uint32_t pitch = a.channels * a.parts;
        const int64_t begin = int64_t{of.first_outer} * pitch + of.first_channel * a.parts;
        each_partial(a.partials + 2 * begin, of.outers, pitch, of.channels * a.parts,
                     thread & (lanes - 1), lanes,
                     [&](uint32_t, uint32_t, double one, double other) {
                       sums.first += one;
                       sums.second += other;
                     });
      }
      shared.values[0][thread] = sums.first;
      shared.values[1][thread] = sums.second;
    });
    reduce(threads, shared, lanes, 1);
    threads.last([&](uint32_t thread) {
      const uint32_t statistic = first + thread / lanes;
      if (statistic >= statistics_of(a) || (thread & (lanes - 1)) != 0) return;
      put_statistic(a, statistic, {shared.values[0][thread], shared.values[1][thread]});
    });
  }
};

// Gradients of the sums, in the first blocks, and of the parameters.
struct FinishGradientSums {
  using Shared = Reduction<2>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    if (block < a.statistic_blocks) {
      of_statistics(a, block, threads, shared);
    } else {
      of_parameters(a, block - a.statistic_blocks, threads, shared);
    }
  }

  template <class Threads>
  GPUDIST_HOST_DEVICE static void of_statistics(const NormArguments& a, uint32_t block,
                                                const Threads& threads, Shared& shared) {
    const uint32_t lanes = a.grid.lanes;
    const uint32_t first = block * (kThreads / lanes);
    const bool weighs = a.weight != nullptr && !a.has_parameters_of_cells;
    threads([&](uint32_t thread) {
      const uint32_t statistic = first + thread / lanes;
      NormSums sums;
      if (statistic < statistics_of(a)) {
        const StatisticPartials of(a, statistic);
        const uint32_t pitch = a.channels * a.parts;
        const int64_t begin = int64_t{of.first_outer} * pitch + of.first_channel * a.parts;
        each_partial(a.partials + 2 * begin, of.outers, pitch, of.channels * a.parts,
                     thread & (lanes - 1), lanes,
                     [&](uint32_t, uint32_t number, double one, double other) {
                       double weight = 1;
                       if (weighs) {
                         const uint32_t channel =
                             of.first_channel + (a.parts == 1 ? number : number / a.parts);
                         weight = value_at(a.weight, channel, a.parameter_dtype);
                       }
                       sums.first = fma(weight, one, sums.first);
                       sums.second = fma(weight, other, sums.second);
                     });
      }
      shared.values[0][thread] = sums.first;
      shared.values[1][thread] = sums.second;
    });
    reduce(threads, shared, lanes, 1);
    threads.last([&](uint32_t thread) {
      const uint32_t statistic = first + thread / lanes;
      if (statistic >= statistics_of(a) || (thread & (lanes - 1)) != 0) return;
      const NormMoments moments(a, statistic);
      const double inverse = moments.inverse(a.eps), one = shared.values[0][thread];
      const double other = fma(-moments.error, one, shared.values[1][thread]);
      const double of_square = -0.5 * inverse * inverse * inverse * other / a.count;
      const double of_sum = -fma(inverse, one / a.count, 2 * moments.mean * of_square);
      put_statistic(a, statistic, {of_sum, of_square});
    });
  }

  // Sum of products with normalized values, from the sums of gradients and of their products with
  // `x - shift`.
  GPUDIST_HOST_DEVICE static double product(const NormArguments& a, uint32_t outer,
                                            uint32_t channel, double first, double second) {
    const NormMoments moments(a, statistic_of(a, outer, channel));
    return moments.inverse(a.eps) * fma(-moments.error, first, second);
  }

  template <class Threads>
  GPUDIST_HOST_DEVICE static void of_parameters(const NormArguments& a, uint32_t block,
                                                const Threads& threads, Shared& shared) {
    const uint32_t lanes = a.lanes_of_parameters;
    const uint32_t first = block * (kThreads / lanes);
    const uint32_t count = a.has_parameters_of_cells ? static_cast<uint32_t>(a.cells) : a.channels;
    const bool has_one_statistic = a.shares_outer || a.outer == 1;
    threads([&](uint32_t thread) {
      const uint32_t number = first + thread / lanes;
      NormSums sums;
      if (number < count && a.has_parameters_of_cells) {
        each_partial(a.partials_of_cells + int64_t{2} * number * a.parts_of_cells, 1, 0,
                     a.parts_of_cells, thread & (lanes - 1), lanes,
                     [&](uint32_t, uint32_t, double one, double other) {
                       sums.first += one;
                       sums.second += other;
                     });
      } else if (number < count) {
        each_partial(a.partials + int64_t{2} * number * a.parts, a.outer, a.channels * a.parts,
                     a.parts, thread & (lanes - 1), lanes,
                     [&](uint32_t outer, uint32_t, double one, double other) {
                       sums.first += one;
                       if (!has_one_statistic) other = product(a, outer, number, one, other);
                       sums.second += other;
                     });
      }
      shared.values[0][thread] = sums.first;
      shared.values[1][thread] = sums.second;
    });
    reduce(threads, shared, lanes, 1);
    threads.last([&](uint32_t thread) {
      const uint32_t number = first + thread / lanes;
      if (number >= count || (thread & (lanes - 1)) != 0) return;
      double product_sum = shared.values[1][thread];
      if (has_one_statistic && !a.has_parameters_of_cells) {
        product_sum = product(a, 0, number, shared.values[0][thread], product_sum);
      }
      const float one = static_cast<float>(shared.values[0][thread]);
      const float other = static_cast<float>(product_sum);
      if (a.of_bias != nullptr) put_value(a.of_bias, number, a.parameter_dtype, one);
      if (a.of_weight != nullptr) put_value(a.of_weight, number, a.parameter_dtype, other);
    });
  }
};

}  // namespace norming
}  // namespace gpudist
