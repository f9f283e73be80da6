// Sums of gradients, and of their products with the cells.
#pragma once

#include "core/norm_statistics.h"
#include "core/norm_sums.h"

namespace gpudist {
namespace norming {

// Add gradients, and their products with `x - shift`.
template <class Value, int kCount, int kWidth>
GPUDIST_HOST_DEVICE inline void add_products(const Value (&gradients)[kCount][kWidth],
                                             const Value (&x)[kCount][kWidth], int valid,
                                             Value shift, NormSums& sums) {
  Value first = 0, second = 0;
  for (int k = 0; k < kCount; ++k) {
    for (int i = 0; i < kWidth; ++i) {
      const Value gradient = k < valid ? gradients[k][i] : Value{0};
      first += gradient;
      second = fused(gradient, k < valid ? x[k][i] - shift : Value{0}, second);
    }
  }
  sums.first += static_cast<double>(first);
  sums.second += static_cast<double>(second);
}

template <class Cells, class Results>
struct GradientSumsOfRows {
  using Value = typename Cells::Value;
  struct Shared {
    Reduction<2> sums;
    Value shifts[kThreads];
  };
  static constexpr int kCount = kLoadsOfTwo, kWidth = Cells::kWidth;
  struct Loaded {
    Batch<Cells, kCount> x;
    Batch<Results, kCount> gradient;

    GPUDIST_HOST_DEVICE void load(const NormArguments& a, int64_t first, int64_t step,
                                  int64_t left) {
      x.load(a.x, first, step, step, left, a.dtype);
      gradient.load(a.gradient, first, step, step, left, a.result_dtype);
    }
  };

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    typename Threads::template Each<Loaded> loaded;
    threads([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      if (!at.is_there) return;
      const int64_t step = a.grid.lanes * kWidth, i = at.begin + at.lane * kWidth;
      if (i < at.end) loaded[thread].load(a, at.line * a.cells + i, step, at.end - i);
      if (at.lane == 0) shared.shifts[at.number] = at.template factors<LineShift<Value>>(a).shift;
    });
    threads([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      NormSums sums;
      if (at.is_there) {
        const int64_t step = a.grid.lanes * kWidth, first = at.line * a.cells;
        const Value shift = shared.shifts[at.number];
        for (int64_t i = at.begin + at.lane * kWidth; i < at.end;) {
          Value x[kCount][kWidth], gradients[kCount][kWidth];
          for (int k = 0; k < kCount; ++k) {
            Cells::widen(loaded[thread].x.raws[k], a.dtype, x[k]);
            Results::widen(loaded[thread].gradient.raws[k], a.result_dtype, gradients[k]);
          }
          add_products(gradients, x, valid_groups<kCount>(at.end - i, step), shift, sums);
          i += kCount * step;
          if (i < at.end) loaded[thread].load(a, first + i, step, at.end - i);
        }
      }
      shared.sums.values[0][thread] = sums.first;
      shared.sums.values[1][thread] = sums.second;
    });
    reduce(threads, shared.sums, a.grid.lanes, 1);
    threads.last([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      if (!at.is_there || at.lane != 0) return;
      put_sums<false>(a, at.line, at.part,
                      {shared.sums.values[0][thread], shared.sums.values[1][thread]});
    });
  }
};

template <class Cells, class Results>
struct GradientSumsOfColumns {
  using Value = typename Cells::Value;
  static constexpr int kWidth = Cells::kWidth, kCount = kLoadsOfTwoColumns<Cells, Results>;
  struct Shared {
    Reduction<2 * kWidth> sums;
    Value shifts[32 * kWidth];
  };

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    threads([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      const uint32_t column = at.tile * a.grid.lanes * kWidth + thread;
      if (thread < a.grid.lanes * kWidth && column < a.channels) {
        shared.shifts[thread] = LineShift<Value>::template of<false>(a, at.outer, column).shift;
      }
    });
    threads([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      NormSums sums[kWidth];
      if (at.column < a.channels) {
        Value shifts[kWidth];
        for (int i = 0; i < kWidth; ++i) shifts[i] = shared.shifts[at.x * kWidth + i];
        const int64_t step = at.steps * static_cast<int64_t>(a.channels);
        for (int64_t row = at.begin + at.y; row < at.end; row += kCount * at.steps) {
          Batch<Cells, kCount> x;
          Batch<Results, kCount> gradient;
          const int64_t first = (at.outer * a.cells + row) * a.channels + at.column;
          x.load(a.x, first, step, at.steps, at.end - row, a.dtype);
          gradient.load(a.gradient, first, step, at.steps, at.end - row, a.result_dtype);
          const int valid = valid_groups<kCount>(at.end - row, at.steps);
          Value from[kWidth][kCount][1], gradients[kWidth][kCount][1];
          for (int k = 0; k < kCount; ++k) {
            Value cells[kWidth];
            Cells::widen(x.raws[k], a.dtype, cells);
            for (int i = 0; i < kWidth; ++i) from[i][k][0] = cells[i];
            Results::widen(gradient.raws[k], a.result_dtype, cells);
            for (int i = 0; i < kWidth; ++i) gradients[i][k][0] = cells[i];
          }
          for (int i = 0; i < kWidth; ++i) {
            add_products(gradients[i], from[i], valid, shifts[i], sums[i]);
          }
        }
      }
      for (int i = 0; i < kWidth; ++i) {
        shared.sums.values[2 * i][thread] = sums[i].first;
        shared.sums.values[2 * i + 1][thread] = sums[i].second;
      }
    });
    put_column_sums<kWidth, false>(a, block, threads, shared.sums);
  }
};

// Sums over the cells of each line, and over the lines for each cell, in one pass over both
// tensors: a tile of some lines at a time.
template <class Cells, class Results>
struct GradientSumsOfCells {
  using Value = typename Cells::Value;
  static constexpr int kWidth = Cells::kWidth, kCount = kLoadsOfCells<Cells, Results>;
  static constexpr uint32_t kMostLines = kCount * kThreads;
  struct Shared {
    Reduction<2 * kWidth> sums;
    LineFactors<Value> factors[kMostLines];
    // Of each line of the tile: sums over the columns of each thread, with a gap between lines so
    // that threads that read neighbouring lines use different banks.
    Value lines[2][kMostLines + kMostLines / 2];
  };
  struct State {
    Batch<Cells, kCount> x;
    Batch<Results, kCount> gradient;
  };

  // Load the cells of a tile that begins with this line, if there is one.
  GPUDIST_HOST_DEVICE static void load(const NormArguments& a, uint32_t block, uint32_t thread,
                                       int64_t first_line, State& state) {
    const ColumnPlace<kWidth> at(a.grid, a.outer, block, thread);
    const int64_t line = first_line + at.y;
    if (at.column >= a.cells || line >= at.end) return;
    const int64_t first = line * a.cells + at.column, step = at.steps * a.cells;
    state.x.load(a.x, first, step, at.steps, at.end - line, a.dtype);
    state.gradient.load(a.gradient, first, step, at.steps, at.end - line, a.result_dtype);
  }

  GPUDIST_HOST_DEVICE static void put_factors(const NormArguments& a,
                                              const ColumnPlace<kWidth>& all, int64_t first_line,
                                              uint32_t thread, Shared& shared) {
    for (uint32_t i = thread; i < kCount * all.steps && i < all.end - first_line; i += kThreads) {
      shared.factors[i] =
          LineFactors<Value>::template of<true>(a, static_cast<uint32_t>(first_line) + i, 0);
    }
  }

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    typename Threads::template Each<State> states;
    const uint32_t lanes = a.grid.lanes, pitch = lanes | 1, steps = kThreads / lanes;
    const uint32_t tile_lines = kCount * steps;
    const ColumnPlace<kWidth> all(a.grid, a.outer, block, 0);
    threads([&](uint32_t thread) {
      load(a, block, thread, all.begin, states[thread]);
      for (int v = 0; v < 2 * kWidth; ++v) shared.sums.values[v][thread] = 0;
      put_factors(a, all, all.begin, thread, shared);
    });
    for (int64_t first_line = all.begin; first_line < all.end; first_line += tile_lines) {
      const int64_t left = all.end - first_line;
      threads([&](uint32_t thread) {
        const ColumnPlace<kWidth> at(a.grid, a.outer, block, thread);
        State& state = states[thread];
        Value weights[kWidth];
        for (int i = 0; i < kWidth; ++i) weights[i] = 1;
        const bool has_columns = at.column < a.cells;
        if (has_columns && a.weight != nullptr) {
          load_parameters(a.weight, at.column, a.parameter_dtype, weights);
        }
        Value biases[kWidth] = {}, scales[kWidth] = {};
        for (int k = 0; k < kCount; ++k) {
          const uint32_t line = at.y + k * steps;
          if (line >= left) break;
          Value first = 0, second = 0;
          if (has_columns) {
            Value x[kWidth], gradients[kWidth];
            Cells::widen(state.x.raws[k], a.dtype, x);
            Results::widen(state.gradient.raws[k], a.result_dtype, gradients);
            const LineFactors<Value> by = shared.factors[line];
            for (int i = 0; i < kWidth; ++i) {
              const Value moved = x[i] - by.shift, weighed = gradients[i] * weights[i];
              biases[i] += gradients[i];
              scales[i] = fused(gradients[i], fused(moved, by.scale, by.add), scales[i]);
              first += weighed;
              second = fused(weighed, moved, second);
            }
          }
          shared.lines[0][line * pitch + at.x] = first;
          shared.lines[1][line * pitch + at.x] = second;
        }
        // Each thread's own sums, for which there are no registers.
        for (int i = 0; i < kWidth; ++i) {
          shared.sums.values[2 * i][thread] += static_cast<double>(biases[i]);
          shared.sums.values[2 * i + 1][thread] += static_cast<double>(scales[i]);
        }
      });
      // Meanwhile some threads add up the lines of this tile, and others prepare the next.
      threads([&](uint32_t thread) {
        for (uint32_t i = thread; i < 2 * tile_lines; i += kThreads) {
          const uint32_t line = i / 2, which = i & 1;
          if (line >= left) break;
          double sum = 0;
          uint32_t lane = 0;
          do {
            sum += static_cast<double>(shared.lines[which][line * pitch + lane]);
          } while (++lane < lanes);
          a.partials[2 * ((first_line + line) * a.grid.tiles + all.tile) + which] = sum;
        }
        put_factors(a, all, first_line + tile_lines, kThreads - 1 - thread, shared);
        load(a, block, thread, first_line + tile_lines, states[thread]);
      });
    }
    reduce(threads, shared.sums, steps, lanes);
    threads.last([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.outer, block, thread);
      if (at.y != 0 || at.column >= a.cells) return;
      for (int i = 0; i < kWidth; ++i) {
        double* const to = a.partials_of_cells + 2 * ((at.column + i) * a.grid.parts + at.part);
        to[0] = shared.sums.values[2 * i][thread];
        to[1] = shared.sums.values[2 * i + 1][thread];
      }
    });
  }
};

}  // namespace norming
}  // namespace gpudist
