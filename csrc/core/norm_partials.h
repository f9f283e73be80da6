// Sums over the partial sums of parts of lines.
#pragma once

#include "core/norm_statistics.h"
#include "core/norm_sums.h"

namespace gpudist {
namespace norming {

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

  // Call `add(outer, number, first, second)` for every `lanes`-th pair.
  template <class Add>
  GPUDIST_HOST_DEVICE void each(const NormArguments& a, uint32_t lane, uint32_t lanes,
                                const Add& add) const {
    const uint32_t pitch = a.channels * a.parts;
    const int64_t begin = int64_t{first_outer} * pitch + first_channel * a.parts;
    each_partial(a.partials + 2 * begin, outers, pitch, channels * a.parts, lane, lanes, add);
  }

 private:
  GPUDIST_HOST_DEVICE static uint32_t within(int64_t number, uint32_t most) {
    return static_cast<uint32_t>(number < 0 ? 0 : number < most ? number : most);
  }
};

// Write `count` results from sums of partials: `lanes` threads call `add(result, lane, sums)` for
// each, and one of them calls `put(result, sums)`.
template <class Threads, class Add, class Put>
GPUDIST_HOST_DEVICE inline void finish(const Threads& threads, Reduction<2>& shared, uint32_t block,
                                       uint32_t lanes, uint32_t count, const Add& add,
                                       const Put& put) {
  const uint32_t first = block * (kThreads / lanes);
  threads([&](uint32_t thread) {
    const uint32_t result = first + thread / lanes;
    NormSums sums;
    if (result < count) add(result, thread & (lanes - 1), sums);
    shared.values[0][thread] = sums.first;
    shared.values[1][thread] = sums.second;
  });
  reduce(threads, shared, lanes, 1);
  threads.last([&](uint32_t thread) {
    const uint32_t result = first + thread / lanes;
    if (result >= count || (thread & (lanes - 1)) != 0) return;
    put(result, NormSums{shared.values[0][thread], shared.values[1][thread]});
  });
}

struct FinishSums {
  using Shared = Reduction<2>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    const uint32_t lanes = a.grid.lanes;
    finish(
        threads, shared, block, lanes, statistics_of(a),
        [&](uint32_t statistic, uint32_t lane, NormSums& sums) {
          StatisticPartials(a, statistic)
              .each(a, lane, lanes, [&](uint32_t, uint32_t, double one, double other) {
                sums.first += one;
                sums.second += other;
              });
        },
        [&](uint32_t statistic, const NormSums& sums) { put_statistic(a, statistic, sums); });
  }
};

// Gradients of the sums, in the first blocks, and of the parameters.
template <class Value>
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
    const bool weighs = a.weight != nullptr && !a.has_parameters_of_cells;
    finish(
        threads, shared, block, lanes, statistics_of(a),
        [&](uint32_t statistic, uint32_t lane, NormSums& sums) {
          const StatisticPartials of(a, statistic);
          of.each(a, lane, lanes, [&](uint32_t, uint32_t number, double one, double other) {
            double weight = 1;
            if (weighs) {
              const uint32_t channel =
                  of.first_channel + (a.parts == 1 ? number : number / a.parts);
              weight = value_at<Value>(a.weight, channel, a.parameter_dtype);
            }
            sums.first = fma(weight, one, sums.first);
            sums.second = fma(weight, other, sums.second);
          });
        },
        [&](uint32_t statistic, const NormSums& sums) {
          const NormMoments<Value> moments(a, statistic);
          const double inverse = moments.inverse(a.eps), one = sums.first;
          const double other = fma(-moments.error, one, sums.second);
          const double of_square = -0.5 * inverse * inverse * inverse * other / a.count;
          const double of_sum = -fma(inverse, one / a.count, 2 * moments.mean * of_square);
          put_statistic(a, statistic, {of_sum, of_square});
        });
  }

  // Sum of products with normalized values, from the sums of gradients and of their products with
  // `x - shift`.
  GPUDIST_HOST_DEVICE static double product(const NormArguments& a, uint32_t outer,
                                            uint32_t channel, const NormSums& sums) {
    const NormMoments<Value> moments(a, statistic_of(a, outer, channel));
    return moments.inverse(a.eps) * fma(-moments.error, sums.first, sums.second);
  }

  template <class Threads>
  GPUDIST_HOST_DEVICE static void of_parameters(const NormArguments& a, uint32_t block,
                                                const Threads& threads, Shared& shared) {
    const uint32_t lanes = a.lanes_of_parameters;
    const uint32_t count = a.has_parameters_of_cells ? static_cast<uint32_t>(a.cells) : a.channels;
    const bool has_one_statistic = a.shares_outer || a.outer == 1;
    finish(
        threads, shared, block, lanes, count,
        [&](uint32_t number, uint32_t lane, NormSums& sums) {
          if (a.has_parameters_of_cells) {
            each_partial(a.partials_of_cells + int64_t{2} * number * a.parts_of_cells, 1, 0,
                         a.parts_of_cells, lane, lanes,
                         [&](uint32_t, uint32_t, double one, double other) {
                           sums.first += one;
                           sums.second += other;
                         });
            return;
          }
          each_partial(a.partials + int64_t{2} * number * a.parts, a.outer, a.channels * a.parts,
                       a.parts, lane, lanes,
                       [&](uint32_t outer, uint32_t, double one, double other) {
                         sums.first += one;
                         if (!has_one_statistic) other = product(a, outer, number, {one, other});
                         sums.second += other;
                       });
        },
        [&](uint32_t number, const NormSums& sums) {
          double of_weight = sums.second;
          if (has_one_statistic && !a.has_parameters_of_cells) {
            of_weight = product(a, 0, number, sums);
          }
          const auto put = [&](char* to, double value) {
            if (to != nullptr) put_value(to, number, a.parameter_dtype, static_cast<Value>(value));
          };
          put(a.of_bias, sums.first);
          put(a.of_weight, of_weight);
        });
  }
};

}  // namespace norming
}  // namespace gpudist
