// Sums of lines, and of squares.
#pragma once

#include <cmath>

#include "core/norm_cells.h"
#include "core/norm_places.h"
#include "core/norm_statistics.h"

namespace gpudist {
namespace norming {

struct NormSums {
  double first = 0;
  double second = 0;
};

// Add `values - shift` and its square, moved by the mean of the batch: squares of small numbers are
// more precise. `valid` of the `kCount` groups of values count; the others repeat the first.
template <class Value, int kCount, int kWidth>
GPUDIST_HOST_DEVICE inline void add_batch(const Value (&values)[kCount][kWidth], int valid,
                                          bool subtracts_mean, NormSums& sums) {
  Value shift = 0;
  if (subtracts_mean) {
    Value sum = 0;
    for (int k = 0; k < kCount; ++k) {
      Value group = values[k][0];
      for (int i = 1; i < kWidth; ++i) group += values[k][i];
      sum += group;
    }
    shift = sum * (Value{1} / (kCount * kWidth));
  }
  Value first = 0, second = 0;
  for (int k = 0; k < kCount; ++k) {
    for (int i = 0; i < kWidth; ++i) {
      const Value moved = k < valid ? values[k][i] - shift : Value{0};
      first += moved;
      second = fused(moved, moved, second);
    }
  }
  const double by = shift, plain = first, offset = static_cast<double>(valid * kWidth) * by;
  sums.first += plain + offset;
  sums.second += fma(by, fma(2.0, plain, offset), static_cast<double>(second));
}

// Number of groups at `distance` from each other that begin within `left`.
template <int kCount>
GPUDIST_HOST_DEVICE inline int valid_groups(int64_t left, int64_t distance) {
  int valid = 0;
  for (int k = 0; k < kCount; ++k) valid += k * distance < left;
  return valid;
}

// Write the sums of a statistic.
GPUDIST_HOST_DEVICE inline void put_statistic(const NormArguments& a, int64_t statistic,
                                              const NormSums& sums) {
  if (a.subtracts_mean) {
    a.sums[2 * statistic] = sums.first, a.sums[2 * statistic + 1] = sums.second;
  } else {
    a.sums[statistic] = sums.second;
  }
}

// Write the sums of a part of a line. Those of gradients are never finished.
template <bool kMayFinish>
GPUDIST_HOST_DEVICE inline void put_sums(const NormArguments& a, int64_t line, uint32_t part,
                                         const NormSums& sums) {
  if (kMayFinish && a.is_finished) return put_statistic(a, line, sums);
  double* const to = a.partials + 2 * (line * a.grid.parts + part);
  to[0] = sums.first, to[1] = sums.second;
}

// Widen cells of one channel after another, minus what is subtracted before they are summed.
template <class Cells>
GPUDIST_HOST_DEVICE inline void widen_moved(const typename Cells::Raw& raw, const NormArguments& a,
                                            typename Cells::Value base,
                                            typename Cells::Value (&values)[Cells::kWidth]) {
  Cells::widen(raw, a.dtype, values);
  if constexpr (kIsDouble<typename Cells::Value>) values[0] -= base;
}

template <class Cells>
struct SumsOfRows {
  using Value = typename Cells::Value;
  using Shared = Reduction<2>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    constexpr int kCount = kLoads<Cells>, kWidth = Cells::kWidth;
    threads([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      const int64_t step = a.grid.lanes * kWidth;
      NormSums sums;
      if (at.is_there) {
        const int64_t first = at.line * a.cells;
        const Value base = at.template factors<LineBase<Value>>(a).base;
        for (int64_t i = at.begin + at.lane * kWidth; i < at.end; i += kCount * step) {
          Batch<Cells, kCount> batch;
          batch.load(a.x, first + i, step, step, at.end - i, a.dtype);
          Value values[kCount][kWidth];
          for (int k = 0; k < kCount; ++k) widen_moved<Cells>(batch.raws[k], a, base, values[k]);
          add_batch(values, valid_groups<kCount>(at.end - i, step), a.subtracts_mean, sums);
        }
      }
      shared.values[0][thread] = sums.first;
      shared.values[1][thread] = sums.second;
    });
    reduce(threads, shared, a.grid.lanes, 1);
    threads.last([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      if (!at.is_there || at.lane != 0) return;
      put_sums<true>(a, at.line, at.part, {shared.values[0][thread], shared.values[1][thread]});
    });
  }
};

// Write the partial sums of the columns of a tile.
template <int kWidth, bool kMayFinish, class Threads>
GPUDIST_HOST_DEVICE inline void put_column_sums(const NormArguments& a, uint32_t block,
                                                const Threads& threads,
                                                Reduction<2 * kWidth>& shared) {
  reduce(threads, shared, kThreads / a.grid.lanes, a.grid.lanes);
  threads.last([&](uint32_t thread) {
    const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
    if (at.y != 0 || at.column >= a.channels) return;
    for (int i = 0; i < kWidth; ++i) {
      put_sums<kMayFinish>(a, int64_t{at.outer} * a.channels + at.column + i, at.part,
                           {shared.values[2 * i][thread], shared.values[2 * i + 1][thread]});
    }
  });
}

template <class Cells>
struct SumsOfColumns {
  using Value = typename Cells::Value;
  static constexpr int kWidth = Cells::kWidth;
  using Shared = Reduction<2 * kWidth>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    constexpr int kCount = kLoadsOfColumns;
    threads([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      NormSums sums[kWidth];
      if (at.column < a.channels) {
        const int64_t step = at.steps * static_cast<int64_t>(a.channels);
        const int64_t start = at.begin + at.y;
        int64_t first = (at.outer * a.cells + start) * a.channels + at.column;
        const auto column = static_cast<uint32_t>(at.column);
        const Value base = LineBase<Value>::template of<false>(a, at.outer, column).base;
        for (int64_t left = at.end - start; left > 0; left -= kCount * at.steps) {
          Batch<Cells, kCount> batch;
          batch.load(a.x, first, step, at.steps, left, a.dtype);
          first += kCount * step;
          Value values[kWidth][kCount][1];
          for (int k = 0; k < kCount; ++k) {
            Value cells[kWidth];
            widen_moved<Cells>(batch.raws[k], a, base, cells);
            for (int i = 0; i < kWidth; ++i) values[i][k][0] = cells[i];
          }
          const int valid = valid_groups<kCount>(left, at.steps);
          for (int i = 0; i < kWidth; ++i) add_batch(values[i], valid, a.subtracts_mean, sums[i]);
        }
      }
      for (int i = 0; i < kWidth; ++i) {
        shared.values[2 * i][thread] = sums[i].first;
        shared.values[2 * i + 1][thread] = sums[i].second;
      }
    });
    put_column_sums<kWidth, true>(a, block, threads, shared);
  }
};

}  // namespace norming
}  // namespace gpudist
