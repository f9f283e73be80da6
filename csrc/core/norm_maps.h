// Passes that write a cell for each cell: the normalized block, and its gradient.
#pragma once

#include "core/norm_places.h"
#include "core/norm_statistics.h"

namespace gpudist {
namespace norming {

// Update running moments in a block of threads of their own.
template <class Value>
GPUDIST_HOST_DEVICE inline void update_running(const NormArguments& a, uint32_t thread) {
  const double factor = a.batches == nullptr ? a.momentum : 1 / static_cast<double>(*a.batches);
  const double unbiased = a.count > 1 ? a.count / (a.count - 1) : 1;
  for (uint32_t channel = thread; channel < a.channels; channel += kThreads) {
    const NormMoments<Value> moments(a, channel);
    const double of_batch = static_cast<double>(moments.shift) + moments.error;
    const double mean = value_at<Value>(a.running_mean, channel, a.running_dtype);
    const double variance = value_at<Value>(a.running_variance, channel, a.running_dtype);
    put_value(a.running_mean, channel, a.running_dtype,
              static_cast<Value>(fma(of_batch - mean, factor, mean)));
    put_value(a.running_variance, channel, a.running_dtype,
              static_cast<Value>(fma(moments.variance * unbiased - variance, factor, variance)));
  }
}

template <class Factors>
GPUDIST_HOST_DEVICE inline const Factors& factor_of(const Factors& one, int) {
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): called with variables alone
  return one;
}
template <class Factors, int kWidth>
GPUDIST_HOST_DEVICE inline const Factors& factor_of(const Factors (&each)[kWidth], int i) {
  return each[i];
}

template <class Cells, class Results>
struct Normalized {
  using Value = typename Cells::Value;
  using Factors = LineFactors<Value>;
  using Written = Results;
  static constexpr bool kMayUpdate = true;
  static constexpr int kWidth = Cells::kWidth;
  static constexpr int kLoadsOfRows = kLoads<Cells>, kLoadsOfColumns = kLoads<Cells>;

  GPUDIST_HOST_DEVICE static Dtype dtype(const NormArguments& a) { return a.result_dtype; }

  template <int kCount>
  struct Loaded {
    Batch<Cells, kCount> x;

    GPUDIST_HOST_DEVICE void load(const NormArguments& a, int64_t first, int64_t step,
                                  int64_t distance, int64_t left) {
      x.load(a.x, first, step, distance, left, a.dtype);
    }
    // `cell`: number of the first cell in its line, to which parameters may belong.
    template <bool kOfCells, class Each>
    GPUDIST_HOST_DEVICE void get(const NormArguments& a, int k, Value (&values)[kWidth],
                                 const Each& factors, int64_t cell) const {
      Cells::widen(x.raws[k], a.dtype, values);
      for (int i = 0; i < kWidth; ++i) {
        const Factors& by = factor_of(factors, i);
        values[i] = fused(values[i] - by.shift, by.scale, by.add);
      }
      Value parameters[kWidth];
      if (kOfCells && a.weight != nullptr) {
        load_parameters(a.weight, cell, a.parameter_dtype, parameters);
        for (int i = 0; i < kWidth; ++i) values[i] *= parameters[i];
      }
      if (kOfCells && a.bias != nullptr) {
        load_parameters(a.bias, cell, a.parameter_dtype, parameters);
        for (int i = 0; i < kWidth; ++i) values[i] += parameters[i];
      }
    }
  };
};

template <class Cells, class Results>
struct GradientOfX {
  using Value = typename Cells::Value;
  using Factors = GradientFactors<Value>;
  using Written = Cells;
  static constexpr bool kMayUpdate = false;
  static constexpr int kWidth = Cells::kWidth;
  static constexpr int kLoadsOfRows = kLoadsOfTwo;
  static constexpr int kLoadsOfColumns = kLoadsOfTwoColumns<Cells, Results>;

  GPUDIST_HOST_DEVICE static Dtype dtype(const NormArguments& a) { return a.dtype; }

  template <int kCount>
  struct Loaded {
    Batch<Cells, kCount> x;
    Batch<Results, kCount> gradient;

    GPUDIST_HOST_DEVICE void load(const NormArguments& a, int64_t first, int64_t step,
                                  int64_t distance, int64_t left) {
      x.load(a.x, first, step, distance, left, a.dtype);
      gradient.load(a.gradient, first, step, distance, left, a.result_dtype);
    }
    template <bool kOfCells, class Each>
    GPUDIST_HOST_DEVICE void get(const NormArguments& a, int k, Value (&values)[kWidth],
                                 const Each& factors, int64_t cell) const {
      Value from[kWidth];
      Cells::widen(x.raws[k], a.dtype, from);
      Results::widen(gradient.raws[k], a.result_dtype, values);
      if (kOfCells && a.weight != nullptr) {
        Value weights[kWidth];
        load_parameters(a.weight, cell, a.parameter_dtype, weights);
        for (int i = 0; i < kWidth; ++i) values[i] *= weights[i];
      }
      for (int i = 0; i < kWidth; ++i) {
        const Factors& by = factor_of(factors, i);
        values[i] = fused(values[i], by.scale, fused(from[i] - by.shift, by.times, by.add));
      }
    }
  };
};

// A pass that reads cells and writes as many: `Values` computes them from factors of their line.
template <bool kOfCells, class Values>
struct MapRows {
  struct Shared {
    typename Values::Factors factors[kThreads];
  };
  static constexpr int kCount = Values::kLoadsOfRows, kWidth = Values::kWidth;
  using Loaded = typename Values::template Loaded<kCount>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    if constexpr (Values::kMayUpdate && !kOfCells) {
      if (block >= a.grid.blocks) {
        threads.last([&](uint32_t thread) { update_running<typename Values::Value>(a, thread); });
        return;
      }
    }
    // From the end: what the pass before read last may still be in the cache.
    block = a.grid.blocks - 1 - block;
    typename Threads::template Each<Loaded> loaded;
    threads([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      if (!at.is_there) return;
      const int64_t step = a.grid.lanes * kWidth, i = at.begin + at.lane * kWidth;
      if (i < at.end) {
        loaded[thread].load(a, at.line * a.cells + i, step, step, at.end - i);
      }
      if (at.lane == 0) {
        shared.factors[at.number] = at.template factors<typename Values::Factors, kOfCells>(a);
      }
    });
    threads.last([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      if (!at.is_there) return;
      const int64_t step = a.grid.lanes * kWidth, first = at.line * a.cells;
      const typename Values::Factors factors = shared.factors[at.number];
      for (int64_t i = at.begin + at.lane * kWidth; i < at.end;) {
        for (int k = 0; k < kCount; ++k) {
          if (k * step >= at.end - i) break;
          typename Values::Value values[kWidth];
          loaded[thread].template get<kOfCells>(a, k, values, factors, i + k * step);
          Values::Written::store(a.result, first + i + k * step, Values::dtype(a), values);
        }
        i += kCount * step;
        if (i < at.end) loaded[thread].load(a, first + i, step, step, at.end - i);
      }
    });
  }
};

template <class Values>
struct MapColumns {
  static constexpr int kWidth = Values::kWidth;
  static constexpr uint32_t kMostColumns = 32 * kWidth;
  struct Shared {
    typename Values::Factors factors[kMostColumns];
  };
  static constexpr int kCount = Values::kLoadsOfColumns;
  using Loaded = typename Values::template Loaded<kCount>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    if constexpr (Values::kMayUpdate) {
      if (block >= a.grid.blocks) {
        threads.last([&](uint32_t thread) { update_running<typename Values::Value>(a, thread); });
        return;
      }
    }
    block = a.grid.blocks - 1 - block;
    typename Threads::template Each<Loaded> loaded;
    const int64_t row_items = a.channels;
    threads([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      const int64_t row = at.begin + at.y;
      if (at.column < row_items && row < at.end) {
        loaded[thread].load(a, (at.outer * a.cells + row) * row_items + at.column,
                            at.steps * row_items, at.steps, at.end - row);
      }
      const uint32_t column = at.tile * a.grid.lanes * kWidth + thread;
      if (thread < a.grid.lanes * kWidth && column < a.channels) {
        shared.factors[thread] = Values::Factors::template of<false>(a, at.outer, column);
      }
    });
    threads.last([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      if (at.column >= row_items) return;
      typename Values::Factors factors[kWidth];
      for (int i = 0; i < kWidth; ++i) factors[i] = shared.factors[at.x * kWidth + i];
      for (int64_t row = at.begin + at.y; row < at.end;) {
        const int64_t first = (at.outer * a.cells + row) * row_items + at.column;
        for (int k = 0; k < kCount; ++k) {
          if (k * at.steps >= at.end - row) break;
          typename Values::Value values[kWidth];
          loaded[thread].template get<false>(a, k, values, factors, 0);
          Values::Written::store(a.result, first + k * at.steps * row_items, Values::dtype(a),
                                 values);
        }
        row += kCount * at.steps;
        if (row < at.end) {
          loaded[thread].load(a, (at.outer * a.cells + row) * row_items + at.column,
                              at.steps * row_items, at.steps, at.end - row);
        }
      }
    });
  }
};

}  // namespace norming
}  // namespace gpudist
