// Bodies of the normalization kernels. Included by norm_kernels.h.
#pragma once

#include <cmath>
#include <type_traits>
#include <vector>

#include "core/half.h"
#include "core/norm_kernels.h"

#ifndef GPUDIST_NOT_UNROLLED
#ifdef __CUDA_ARCH__
#define GPUDIST_NOT_UNROLLED _Pragma("unroll 1")
#else
#define GPUDIST_NOT_UNROLLED
#endif
#endif

namespace gpudist {
namespace norming {

constexpr uint32_t kThreads = NormArguments::kThreads;

// --- Threads of a block --------------------------------------------------------------------------

// A phase is a function of the thread's number; all threads end it before any begins the next.
// `Each<State>` holds the registers of each thread.
struct DeviceThreads {
  template <class State>
  struct Each {
    State state;
    GPUDIST_HOST_DEVICE State& operator[](uint32_t) { return state; }
  };
  template <class Phase>
  GPUDIST_HOST_DEVICE void operator()(const Phase& phase) const {
    last(phase);
#ifdef __CUDA_ARCH__
    __syncthreads();
#endif
  }
  template <class Phase>
  GPUDIST_HOST_DEVICE void last([[maybe_unused]] const Phase& phase) const {
#ifdef __CUDA_ARCH__
    phase(threadIdx.x);
#endif
  }
};

#ifndef __CUDACC__
struct HostThreads {
  template <class State>
  struct Each {
    std::vector<State> states = std::vector<State>(kThreads);
    State& operator[](uint32_t thread) { return states[thread]; }
  };
  template <class Phase>
  void operator()(const Phase& phase) const {
    for (uint32_t thread = 0; thread < kThreads; ++thread) phase(thread);
  }
  template <class Phase>
  void last(const Phase& phase) const {
    (*this)(phase);
  }
};
#endif

// --- Cells in memory -----------------------------------------------------------------------------

template <class Word>
GPUDIST_HOST_DEVICE inline Word& word_at(char* address) {
  return *reinterpret_cast<Word*>(address);
}
template <class Word>
GPUDIST_HOST_DEVICE inline const Word& word_at(const char* address) {
  return *reinterpret_cast<const Word*>(address);
}

GPUDIST_HOST_DEVICE inline float value_at(const char* from, int64_t item, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return word_at<float>(from + 4 * item);
  const uint16_t bits = word_at<uint16_t>(from + 2 * item);
  return dtype == Dtype::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}
GPUDIST_HOST_DEVICE inline void put_value(char* to, int64_t item, Dtype dtype, float value) {
  if (dtype == Dtype::kFloat32) {
    word_at<float>(to + 4 * item) = value;
  } else {
    word_at<uint16_t>(to + 2 * item) =
        dtype == Dtype::kFloat16 ? float_to_float16(value) : float_to_bfloat16(value);
  }
}

struct Float32Cells {
  static constexpr int kWidth = 4, kBytes = 4;
  struct alignas(16) Raw {
    float values[4];
  };

  GPUDIST_HOST_DEVICE static Raw load(const char* from, int64_t item, Dtype) {
    return word_at<Raw>(from + 4 * item);
  }
  GPUDIST_HOST_DEVICE static void widen(const Raw& raw, Dtype, float (&values)[4]) {
    for (int i = 0; i < 4; ++i) values[i] = raw.values[i];
  }
  GPUDIST_HOST_DEVICE static void store(char* to, int64_t item, Dtype, const float (&values)[4]) {
    word_at<Raw>(to + 4 * item) = {{values[0], values[1], values[2], values[3]}};
  }
};

template <class Pair>
struct HalfCells {
  static constexpr int kWidth = 4, kBytes = 2;
  struct alignas(8) Raw {
    uint32_t words[2];
  };

  GPUDIST_HOST_DEVICE static Raw load(const char* from, int64_t item, Dtype) {
    return word_at<Raw>(from + 2 * item);
  }
  GPUDIST_HOST_DEVICE static void widen(const Raw& raw, Dtype, float (&values)[4]) {
    for (int w = 0; w < 2; ++w) {
      float pair[2];
      Pair::widen(raw.words[w], pair);
      values[2 * w] = pair[0], values[2 * w + 1] = pair[1];
    }
  }
  GPUDIST_HOST_DEVICE static void store(char* to, int64_t item, Dtype, const float (&values)[4]) {
    Raw raw;
    for (int w = 0; w < 2; ++w) {
      const float pair[2] = {values[2 * w], values[2 * w + 1]};
      raw.words[w] = Pair::narrow(pair);
    }
    word_at<Raw>(to + 2 * item) = raw;
  }
};

// Single cells of any dtype, where several cannot be loaded together.
struct SingleCells {
  static constexpr int kWidth = 1, kBytes = 4;
  using Raw = float;

  GPUDIST_HOST_DEVICE static Raw load(const char* from, int64_t item, Dtype dtype) {
    return value_at(from, item, dtype);
  }
  GPUDIST_HOST_DEVICE static void widen(const Raw& raw, Dtype, float (&values)[1]) {
    values[0] = raw;
  }
  GPUDIST_HOST_DEVICE static void store(char* to, int64_t item, Dtype dtype,
                                        const float (&values)[1]) {
    put_value(to, item, dtype, values[0]);
  }
};

// Number of loads of one tensor that a thread has in flight: as many as the registers allow.
template <class Cells>
constexpr int kLoads = Cells::kWidth == 1 ? 8 : 16 / Cells::kBytes;
constexpr int kLoadsOfColumns = 4;
// Of each of two tensors.
constexpr int kLoadsOfTwo = 4;
template <class Cells>
constexpr int kLoadsOfTwoColumns = 8 / Cells::kBytes;
template <class Cells>
constexpr int kLoadsOfCells = Cells::kWidth == 1 ? 4 : 8 / Cells::kBytes;

// Parameters of `kWidth` cells.
template <int kWidth>
GPUDIST_HOST_DEVICE inline void load_parameters(const char* from, int64_t item, Dtype dtype,
                                                float (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = value_at(from, item, dtype);
  } else if (dtype == Dtype::kFloat32) {
    Float32Cells::widen(Float32Cells::load(from, item, dtype), dtype, values);
  } else if (dtype == Dtype::kFloat16) {
    using Cells = HalfCells<Float16Pair>;
    Cells::widen(Cells::load(from, item, dtype), dtype, values);
  } else {
    using Cells = HalfCells<Bfloat16Pair>;
    Cells::widen(Cells::load(from, item, dtype), dtype, values);
  }
}

// Loads of one thread at equal distances. Those beyond `left` repeat the first.
template <class Cells, int kCount>
struct Batch {
  typename Cells::Raw raws[kCount];

  GPUDIST_HOST_DEVICE void load(const char* from, int64_t first, int64_t step, int64_t distance,
                                int64_t left, Dtype dtype) {
    for (int k = 0; k < kCount; ++k) {
      raws[k] = Cells::load(from, k * distance < left ? first + k * step : first, dtype);
    }
  }
};

// --- Statistics ----------------------------------------------------------------------------------

GPUDIST_HOST_DEVICE inline uint32_t statistic_of(const NormArguments& a, uint32_t outer,
                                                 uint32_t channel) {
  const uint32_t shifted = channel + a.group_offset;
  const uint32_t group = a.group_size == 1 ? shifted : shifted / a.group_size;
  return a.shares_outer ? group : outer * a.groups + group;
}

// Statistics of a line. `mean` is `shift + error`, where `shift` is the mean rounded to float32.
struct NormMoments {
  double mean = 0;
  double variance;
  float shift = 0;
  double error = 0;

  GPUDIST_HOST_DEVICE NormMoments(const NormArguments& a, uint32_t statistic) {
    const uint32_t width = a.subtracts_mean ? 2 : 1;
    const double* own = a.totals + int64_t{width} * statistic;
    variance = own[width - 1] / a.count;
    if (!a.subtracts_mean) return;
    mean = own[0] / a.count;
    variance = fma(-mean, mean, variance);
    // Rounding can make the variance of equal values far from zero negative.
    if (variance < 0) variance = 0;
    shift = static_cast<float>(mean);
    error = mean - static_cast<double>(shift);
  }
  GPUDIST_HOST_DEVICE double inverse(double eps) const { return 1 / sqrt(variance + eps); }
};

// Factors of a line: `y = (x - shift) * scale + add`.
struct LineFactors {
  float shift, scale, add;

  GPUDIST_HOST_DEVICE static LineFactors of(const NormArguments& a, uint32_t outer,
                                            uint32_t channel) {
    const NormMoments moments(a, statistic_of(a, outer, channel));
    double factor = moments.inverse(a.eps), offset = -moments.error * factor;
    if (!a.has_parameters_of_cells) {
      if (a.weight != nullptr) {
        const double weight = value_at(a.weight, channel, a.parameter_dtype);
        factor *= weight;
        offset *= weight;
      }
      if (a.bias != nullptr) offset += value_at(a.bias, channel, a.parameter_dtype);
    }
    return {moments.shift, static_cast<float>(factor), static_cast<float>(offset)};
  }
};

// Factors of a line: the gradient is `g * scale + ((x - shift) * times + add)`.
struct GradientFactors {
  float shift, scale, add, times;

  GPUDIST_HOST_DEVICE static GradientFactors of(const NormArguments& a, uint32_t outer,
                                                uint32_t channel) {
    const uint32_t statistic = statistic_of(a, outer, channel), width = a.subtracts_mean ? 2 : 1;
    const NormMoments moments(a, statistic);
    double factor = moments.inverse(a.eps);
    if (!a.has_parameters_of_cells && a.weight != nullptr) {
      factor *= static_cast<double>(value_at(a.weight, channel, a.parameter_dtype));
    }
    const double* own = a.of_totals + int64_t{width} * statistic;
    const double slope = 2 * own[width - 1];
    double offset = slope * static_cast<double>(moments.shift);
    if (a.subtracts_mean) offset += own[0];
    return {moments.shift, static_cast<float>(factor), static_cast<float>(offset),
            static_cast<float>(slope)};
  }
};

// The shift of a line.
struct LineShift {
  float shift;

  GPUDIST_HOST_DEVICE static LineShift of(const NormArguments& a, uint32_t outer,
                                          uint32_t channel) {
    if (!a.subtracts_mean) return {0};
    return {static_cast<float>(a.totals[int64_t{2} * statistic_of(a, outer, channel)] / a.count)};
  }
};

// --- Sums ----------------------------------------------------------------------------------------

struct NormSums {
  double first = 0;
  double second = 0;
};

// Add `values - shift` and its square, moved by the mean of the batch: squares of small numbers are
// more precise. `valid` of the `kCount` groups of values count; the others repeat the first.
template <int kCount, int kWidth>
GPUDIST_HOST_DEVICE inline void add_batch(const float (&values)[kCount][kWidth], int valid,
                                          bool subtracts_mean, NormSums& sums) {
  float shift = 0;
  if (subtracts_mean) {
    float sum = 0;
    for (int k = 0; k < kCount; ++k) {
      float group = values[k][0];
      for (int i = 1; i < kWidth; ++i) group += values[k][i];
      sum += group;
    }
    shift = sum * (1.0f / (kCount * kWidth));
  }
  float first = 0, second = 0;
  for (int k = 0; k < kCount; ++k) {
    for (int i = 0; i < kWidth; ++i) {
      const float moved = k < valid ? values[k][i] - shift : 0.0f;
      first += moved;
      second = fmaf(moved, moved, second);
    }
  }
  const double by = shift, plain = first, offset = static_cast<double>(valid * kWidth) * by;
  sums.first += plain + offset;
  sums.second += fma(by, fma(2.0, plain, offset), static_cast<double>(second));
}

// Add gradients, and their products with `x - shift`.
template <int kCount, int kWidth>
GPUDIST_HOST_DEVICE inline void add_products(const float (&gradients)[kCount][kWidth],
                                             const float (&x)[kCount][kWidth], int valid,
                                             float shift, NormSums& sums) {
  float first = 0, second = 0;
  for (int k = 0; k < kCount; ++k) {
    for (int i = 0; i < kWidth; ++i) {
      const float gradient = k < valid ? gradients[k][i] : 0.0f;
      first += gradient;
      second = fmaf(gradient, k < valid ? x[k][i] - shift : 0.0f, second);
    }
  }
  sums.first += static_cast<double>(first);
  sums.second += static_cast<double>(second);
}

// Number of groups at `distance` from each other that begin within `left`.
template <int kCount>
GPUDIST_HOST_DEVICE inline int valid_groups(int64_t left, int64_t distance) {
  int valid = 0;
  for (int k = 0; k < kCount; ++k) valid += k * distance < left;
  return valid;
}

template <int kValues>
struct Reduction {
  double values[kValues][kThreads];
};

// Sum over every `kRadix` of the `left` members.
template <uint32_t kRadix, class Threads, int kValues>
GPUDIST_HOST_DEVICE inline void reduce_once(const Threads& threads, Reduction<kValues>& shared,
                                            uint32_t members, uint32_t stride, uint32_t left) {
  const uint32_t next = left / kRadix;
  threads([&](uint32_t thread) {
    if ((thread / stride & (members - 1)) >= next) return;
    for (int v = 0; v < kValues; ++v) {
      double sum = shared.values[v][thread];
      for (uint32_t r = 1; r < kRadix; ++r) sum += shared.values[v][thread + r * next * stride];
      shared.values[v][thread] = sum;
    }
  });
}

// Sum over the members of each group of threads; thread `t` is member `t / stride % members`. The
// sums are those of member 0. Other threads read them after a barrier.
template <class Threads, int kValues>
GPUDIST_HOST_DEVICE inline void reduce(const Threads& threads, Reduction<kValues>& shared,
                                       uint32_t members, uint32_t stride) {
  uint32_t left = members;
  for (; left >= 4; left /= 4) reduce_once<4>(threads, shared, members, stride, left);
  if (left == 2) reduce_once<2>(threads, shared, members, stride, left);
}

// --- Places of threads ---------------------------------------------------------------------------

// Place of a thread in a pass over rows: `lanes` threads share a line, or a part of one.
struct RowPlace {
  uint32_t lane, number;  // `number` of the line in its block of threads
  bool is_there;
  uint32_t line;
  int64_t begin, end;  // cells of the part
  uint32_t part;

  GPUDIST_HOST_DEVICE RowPlace(const NormArguments& a, uint32_t block, uint32_t thread) {
    const NormGrid& grid = a.grid;
    lane = thread & (grid.lanes - 1);
    number = thread / grid.lanes;
    const uint32_t unit = grid.parts == 1 ? block : block / grid.parts;
    part = block - unit * grid.parts;
    line = unit * (kThreads / grid.lanes) + number;
    is_there = line < a.outer * a.channels;
    begin = part * grid.part_cells;
    end = begin + grid.part_cells < a.cells ? begin + grid.part_cells : a.cells;
  }

  // Factors of the line.
  template <class Factors>
  GPUDIST_HOST_DEVICE Factors factors(const NormArguments& a) const {
    const uint32_t outer = a.channels == 1 ? line : line / a.channels;
    return Factors::of(a, outer, line - outer * a.channels);
  }
};

// Place of a thread in a pass over columns: it has `kWidth` columns, in every `steps`-th row.
template <int kWidth>
struct ColumnPlace {
  uint32_t x, y, steps;
  uint32_t tile, part, outer;
  int64_t column;
  int64_t begin, end;  // rows of the part

  GPUDIST_HOST_DEVICE ColumnPlace(const NormGrid& grid, int64_t rows, uint32_t block,
                                  uint32_t thread) {
    x = thread & (grid.lanes - 1);
    y = thread / grid.lanes;
    steps = kThreads / grid.lanes;
    const uint32_t rest = block / grid.tiles;
    tile = block - rest * grid.tiles;
    outer = rest / grid.parts;
    part = rest - outer * grid.parts;
    column = (static_cast<int64_t>(tile) * grid.lanes + x) * kWidth;
    begin = part * grid.part_cells;
    end = begin + grid.part_cells < rows ? begin + grid.part_cells : rows;
  }
};

GPUDIST_HOST_DEVICE inline void put_sums(const NormArguments& a, int64_t line, uint32_t part,
                                         const NormSums& sums) {
  if (!a.is_finished) {
    double* const to = a.partials + 2 * (line * a.grid.parts + part);
    to[0] = sums.first, to[1] = sums.second;
  } else if (a.subtracts_mean) {
    a.sums[2 * line] = sums.first, a.sums[2 * line + 1] = sums.second;
  } else {
    a.sums[line] = sums.second;
  }
}

// --- Passes --------------------------------------------------------------------------------------

template <class Cells>
struct SumsOfRows {
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
        for (int64_t i = at.begin + at.lane * kWidth; i < at.end; i += kCount * step) {
          Batch<Cells, kCount> batch;
          batch.load(a.x, first + i, step, step, at.end - i, a.dtype);
          float values[kCount][kWidth];
          for (int k = 0; k < kCount; ++k) Cells::widen(batch.raws[k], a.dtype, values[k]);
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
      put_sums(a, at.line, at.part, {shared.values[0][thread], shared.values[1][thread]});
    });
  }
};

// Write the partial sums of the columns of a tile.
template <int kWidth, class Threads>
GPUDIST_HOST_DEVICE inline void put_column_sums(const NormArguments& a, uint32_t block,
                                                const Threads& threads,
                                                Reduction<2 * kWidth>& shared) {
  reduce(threads, shared, kThreads / a.grid.lanes, a.grid.lanes);
  threads.last([&](uint32_t thread) {
    const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
    if (at.y != 0 || at.column >= a.channels) return;
    for (int i = 0; i < kWidth; ++i) {
      put_sums(a, int64_t{at.outer} * a.channels + at.column + i, at.part,
               {shared.values[2 * i][thread], shared.values[2 * i + 1][thread]});
    }
  });
}

template <class Cells>
struct SumsOfColumns {
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
        for (int64_t row = at.begin + at.y; row < at.end; row += kCount * at.steps) {
          Batch<Cells, kCount> batch;
          batch.load(a.x, (at.outer * a.cells + row) * a.channels + at.column, step, at.steps,
                     at.end - row, a.dtype);
          float values[kWidth][kCount][1];
          for (int k = 0; k < kCount; ++k) {
            float cells[kWidth];
            Cells::widen(batch.raws[k], a.dtype, cells);
            for (int i = 0; i < kWidth; ++i) values[i][k][0] = cells[i];
          }
          const int valid = valid_groups<kCount>(at.end - row, at.steps);
          for (int i = 0; i < kWidth; ++i) add_batch(values[i], valid, a.subtracts_mean, sums[i]);
        }
      }
      for (int i = 0; i < kWidth; ++i) {
        shared.values[2 * i][thread] = sums[i].first;
        shared.values[2 * i + 1][thread] = sums[i].second;
      }
    });
    put_column_sums<kWidth>(a, block, threads, shared);
  }
};

// Update running moments in a block of threads of their own.
GPUDIST_HOST_DEVICE inline void update_running(const NormArguments& a, uint32_t thread) {
  const double factor = a.batches == nullptr ? a.momentum : 1 / static_cast<double>(*a.batches);
  const double unbiased = a.count > 1 ? a.count / (a.count - 1) : 1;
  for (uint32_t channel = thread; channel < a.channels; channel += kThreads) {
    const NormMoments moments(a, channel);
    const double mean = value_at(a.running_mean, channel, a.running_dtype);
    const double variance = value_at(a.running_variance, channel, a.running_dtype);
    put_value(a.running_mean, channel, a.running_dtype,
              static_cast<float>(fma(moments.mean - mean, factor, mean)));
    put_value(a.running_variance, channel, a.running_dtype,
              static_cast<float>(fma(moments.variance * unbiased - variance, factor, variance)));
  }
}

// A pass that reads cells and writes as many: `Values` computes them from factors of their line.
template <class Cells, bool kOfCells, class Values>
struct MapRows {
  struct Shared {
    typename Values::Factors factors[kThreads];
  };
  static constexpr int kCount = Values::template kLoadsOfRows<Cells>, kWidth = Cells::kWidth;
  using Loaded = typename Values::template Loaded<Cells, kCount>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    if constexpr (Values::kMayUpdate && !kOfCells) {
      if (block >= a.grid.blocks) {
        threads.last([&](uint32_t thread) { update_running(a, thread); });
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
        shared.factors[at.number] = at.template factors<typename Values::Factors>(a);
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
          float values[kWidth];
          loaded[thread].get(a, k, values, factors, kOfCells ? i + k * step : -1);
          Cells::store(a.result, first + i + k * step, a.dtype, values);
        }
        i += kCount * step;
        if (i < at.end) loaded[thread].load(a, first + i, step, step, at.end - i);
      }
    });
  }
};

template <class Cells, class Values>
struct MapColumns {
  static constexpr int kWidth = Cells::kWidth;
  static constexpr uint32_t kMostColumns = 32 * kWidth;
  struct Shared {
    typename Values::Factors factors[kMostColumns];
  };
  static constexpr int kCount = Values::template kLoadsOfColumns<Cells>;
  using Loaded = typename Values::template Loaded<Cells, kCount>;

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    if constexpr (Values::kMayUpdate) {
      if (block >= a.grid.blocks) {
        threads.last([&](uint32_t thread) { update_running(a, thread); });
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
        shared.factors[thread] = Values::Factors::of(a, at.outer, column);
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
          float values[kWidth];
          loaded[thread].get(a, k, values, factors);
          Cells::store(a.result, first + k * at.steps * row_items, a.dtype, values);
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

GPUDIST_HOST_DEVICE inline const LineFactors& factor_of(const LineFactors& one, int) {
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): called with variables alone
  return one;
}
GPUDIST_HOST_DEVICE inline const GradientFactors& factor_of(const GradientFactors& one, int) {
  // NOLINTNEXTLINE(bugprone-return-const-ref-from-parameter): called with variables alone
  return one;
}
template <class Factors, int kWidth>
GPUDIST_HOST_DEVICE inline const Factors& factor_of(const Factors (&each)[kWidth], int i) {
  return each[i];
}

struct Normalized {
  using Factors = LineFactors;
  static constexpr bool kMayUpdate = true;
  template <class Cells>
  static constexpr int kLoadsOfRows = kLoads<Cells>;
  template <class Cells>
  static constexpr int kLoadsOfColumns = kLoads<Cells>;

  template <class Cells, int kCount>
  struct Loaded {
    Batch<Cells, kCount> x;

    GPUDIST_HOST_DEVICE void load(const NormArguments& a, int64_t first, int64_t step,
                                  int64_t distance, int64_t left) {
      x.load(a.x, first, step, distance, left, a.dtype);
    }
    // `cell`: number of the first cell in its line, -1 if parameters do not belong to cells.
    template <int kWidth, class Each>
    GPUDIST_HOST_DEVICE void get(const NormArguments& a, int k, float (&values)[kWidth],
                                 const Each& factors, int64_t cell = -1) const {
      Cells::widen(x.raws[k], a.dtype, values);
      for (int i = 0; i < kWidth; ++i) {
        const Factors& by = factor_of(factors, i);
        values[i] = fmaf(values[i] - by.shift, by.scale, by.add);
      }
      if (cell < 0) return;
      float parameters[kWidth];
      if (a.weight != nullptr) {
        load_parameters(a.weight, cell, a.parameter_dtype, parameters);
        for (int i = 0; i < kWidth; ++i) values[i] *= parameters[i];
      }
      if (a.bias != nullptr) {
        load_parameters(a.bias, cell, a.parameter_dtype, parameters);
        for (int i = 0; i < kWidth; ++i) values[i] += parameters[i];
      }
    }
  };
};

struct GradientOfX {
  using Factors = GradientFactors;
  static constexpr bool kMayUpdate = false;
  template <class Cells>
  static constexpr int kLoadsOfRows = kLoadsOfTwo;
  template <class Cells>
  static constexpr int kLoadsOfColumns = kLoadsOfTwoColumns<Cells>;

  template <class Cells, int kCount>
  struct Loaded {
    Batch<Cells, kCount> x, gradient;

    GPUDIST_HOST_DEVICE void load(const NormArguments& a, int64_t first, int64_t step,
                                  int64_t distance, int64_t left) {
      x.load(a.x, first, step, distance, left, a.dtype);
      gradient.load(a.gradient, first, step, distance, left, a.dtype);
    }
    template <int kWidth, class Each>
    GPUDIST_HOST_DEVICE void get(const NormArguments& a, int k, float (&values)[kWidth],
                                 const Each& factors, int64_t cell = -1) const {
      float from[kWidth];
      Cells::widen(x.raws[k], a.dtype, from);
      Cells::widen(gradient.raws[k], a.dtype, values);
      if (cell >= 0 && a.weight != nullptr) {
        float weights[kWidth];
        load_parameters(a.weight, cell, a.parameter_dtype, weights);
        for (int i = 0; i < kWidth; ++i) values[i] *= weights[i];
      }
      for (int i = 0; i < kWidth; ++i) {
        const Factors& by = factor_of(factors, i);
        values[i] = fmaf(values[i], by.scale, fmaf(from[i] - by.shift, by.times, by.add));
      }
    }
  };
};

template <class Cells>
struct GradientSumsOfRows {
  struct Shared {
    Reduction<2> sums;
    float shifts[kThreads];
  };
  static constexpr int kCount = kLoadsOfTwo, kWidth = Cells::kWidth;
  struct Loaded {
    Batch<Cells, kCount> x, gradient;

    GPUDIST_HOST_DEVICE void load(const NormArguments& a, int64_t first, int64_t step,
                                  int64_t left) {
      x.load(a.x, first, step, step, left, a.dtype);
      gradient.load(a.gradient, first, step, step, left, a.dtype);
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
      if (at.lane == 0) shared.shifts[at.number] = at.template factors<LineShift>(a).shift;
    });
    threads([&](uint32_t thread) {
      const RowPlace at(a, block, thread);
      NormSums sums;
      if (at.is_there) {
        const int64_t step = a.grid.lanes * kWidth, first = at.line * a.cells;
        const float shift = shared.shifts[at.number];
        for (int64_t i = at.begin + at.lane * kWidth; i < at.end;) {
          float x[kCount][kWidth], gradients[kCount][kWidth];
          for (int k = 0; k < kCount; ++k) {
            Cells::widen(loaded[thread].x.raws[k], a.dtype, x[k]);
            Cells::widen(loaded[thread].gradient.raws[k], a.dtype, gradients[k]);
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
      put_sums(a, at.line, at.part, {shared.sums.values[0][thread], shared.sums.values[1][thread]});
    });
  }
};

template <class Cells>
struct GradientSumsOfColumns {
  static constexpr int kWidth = Cells::kWidth, kCount = kLoadsOfTwoColumns<Cells>;
  struct Shared {
    Reduction<2 * kWidth> sums;
    float shifts[32 * kWidth];
  };

  template <class Threads>
  GPUDIST_HOST_DEVICE static void run(const NormArguments& a, uint32_t block, Threads threads,
                                      Shared& shared) {
    threads([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      const uint32_t column = at.tile * a.grid.lanes * kWidth + thread;
      if (thread < a.grid.lanes * kWidth && column < a.channels) {
        shared.shifts[thread] = LineShift::of(a, at.outer, column).shift;
      }
    });
    threads([&](uint32_t thread) {
      const ColumnPlace<kWidth> at(a.grid, a.cells, block, thread);
      NormSums sums[kWidth];
      if (at.column < a.channels) {
        float shifts[kWidth];
        for (int i = 0; i < kWidth; ++i) shifts[i] = shared.shifts[at.x * kWidth + i];
        const int64_t step = at.steps * static_cast<int64_t>(a.channels);
        for (int64_t row = at.begin + at.y; row < at.end; row += kCount * at.steps) {
          Batch<Cells, kCount> x, gradient;
          const int64_t first = (at.outer * a.cells + row) * a.channels + at.column;
          x.load(a.x, first, step, at.steps, at.end - row, a.dtype);
          gradient.load(a.gradient, first, step, at.steps, at.end - row, a.dtype);
          const int valid = valid_groups<kCount>(at.end - row, at.steps);
          float from[kWidth][kCount][1], gradients[kWidth][kCount][1];
          for (int k = 0; k < kCount; ++k) {
            float cells[kWidth];
            Cells::widen(x.raws[k], a.dtype, cells);
            for (int i = 0; i < kWidth; ++i) from[i][k][0] = cells[i];
            Cells::widen(gradient.raws[k], a.dtype, cells);
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
    put_column_sums<kWidth>(a, block, threads, shared.sums);
  }
};

// Sums over the cells of each line, and over the lines for each cell, in one pass over both
// tensors: a tile of some lines at a time.
template <class Cells>
struct GradientSumsOfCells {
  static constexpr int kWidth = Cells::kWidth, kCount = kLoadsOfCells<Cells>;
  static constexpr uint32_t kMostLines = kCount * kThreads;
  struct Shared {
    Reduction<2 * kWidth> sums;
    LineFactors factors[kMostLines];
    // Of each line of the tile: sums over the columns of each thread, with a gap between lines so
    // that threads that read neighbouring lines use different banks.
    float lines[2][kMostLines + kMostLines / 2];
  };
  struct State {
    Batch<Cells, kCount> x, gradient;
  };

  // Load the cells of a tile that begins with this line, if there is one.
  GPUDIST_HOST_DEVICE static void load(const NormArguments& a, uint32_t block, uint32_t thread,
                                       int64_t first_line, State& state) {
    const ColumnPlace<kWidth> at(a.grid, a.outer, block, thread);
    const int64_t line = first_line + at.y;
    if (at.column >= a.cells || line >= at.end) return;
    const int64_t first = line * a.cells + at.column, step = at.steps * a.cells;
    state.x.load(a.x, first, step, at.steps, at.end - line, a.dtype);
    state.gradient.load(a.gradient, first, step, at.steps, at.end - line, a.dtype);
  }

  GPUDIST_HOST_DEVICE static void put_factors(const NormArguments& a,
                                              const ColumnPlace<kWidth>& all, int64_t first_line,
                                              uint32_t thread, Shared& shared) {
    for (uint32_t i = thread; i < kCount * all.steps && i < all.end - first_line; i += kThreads) {
      shared.factors[i] = LineFactors::of(a, static_cast<uint32_t>(first_line) + i, 0);
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
        float weights[kWidth];
        for (int i = 0; i < kWidth; ++i) weights[i] = 1;
        const bool has_columns = at.column < a.cells;
        if (has_columns && a.weight != nullptr) {
          load_parameters(a.weight, at.column, a.parameter_dtype, weights);
        }
        float biases[kWidth] = {}, scales[kWidth] = {};
        for (int k = 0; k < kCount; ++k) {
          const uint32_t line = at.y + k * steps;
          if (line >= left) break;
          float first = 0, second = 0;
          if (has_columns) {
            float x[kWidth], gradients[kWidth];
            Cells::widen(state.x.raws[k], a.dtype, x);
            Cells::widen(state.gradient.raws[k], a.dtype, gradients);
            const LineFactors by = shared.factors[line];
            for (int i = 0; i < kWidth; ++i) {
              const float moved = x[i] - by.shift, weighed = gradients[i] * weights[i];
              biases[i] += gradients[i];
              scales[i] = fmaf(gradients[i], fmaf(moved, by.scale, by.add), scales[i]);
              first += weighed;
              second = fmaf(weighed, moved, second);
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
          for (uint32_t lane = 0; lane < lanes; ++lane) {
            sum += static_cast<double>(shared.lines[which][line * pitch + lane]);
          }
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
      const double one = shared.values[0][thread], other = shared.values[1][thread];
      if (a.subtracts_mean) {
        a.sums[2 * statistic] = one, a.sums[2 * statistic + 1] = other;
      } else {
        a.sums[statistic] = other;
      }
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
      if (a.subtracts_mean) {
        a.sums[2 * statistic] = -fma(inverse, one / a.count, 2 * moments.mean * of_square);
        a.sums[2 * statistic + 1] = of_square;
      } else {
        a.sums[statistic] = of_square;
      }
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

// Call `visit(Body{})` with the body of a call.
template <class Cells, class Visit>
auto visit_pass(const NormCall& call, const Visit& visit) {
  const bool by_columns = call.walk == NormWalk::kColumns, of_cells = call.walk == NormWalk::kCells;
  switch (call.pass) {
    case NormPass::kSums:
      return by_columns ? visit(SumsOfColumns<Cells>{}) : visit(SumsOfRows<Cells>{});
    case NormPass::kNormalize:
      if (by_columns) return visit(MapColumns<Cells, Normalized>{});
      return of_cells ? visit(MapRows<Cells, true, Normalized>{})
                      : visit(MapRows<Cells, false, Normalized>{});
    case NormPass::kGradientSums:
      if (by_columns) return visit(GradientSumsOfColumns<Cells>{});
      return of_cells ? visit(GradientSumsOfCells<Cells>{}) : visit(GradientSumsOfRows<Cells>{});
    case NormPass::kGradient:
      if (by_columns) return visit(MapColumns<Cells, GradientOfX>{});
      return of_cells ? visit(MapRows<Cells, true, GradientOfX>{})
                      : visit(MapRows<Cells, false, GradientOfX>{});
    case NormPass::kFinishSums: return visit(FinishSums{});
    default: return visit(FinishGradientSums{});
  }
}

template <class Visit>
auto visit_body(const NormCall& call, const Visit& visit) {
  if (!call.is_wide) return visit_pass<SingleCells>(call, visit);
  switch (call.arguments.dtype) {
    case Dtype::kFloat16: return visit_pass<HalfCells<Float16Pair>>(call, visit);
    case Dtype::kBfloat16: return visit_pass<HalfCells<Bfloat16Pair>>(call, visit);
    default: return visit_pass<Float32Cells>(call, visit);
  }
}

// Number of loads of one tensor that a thread has in flight.
struct NormLoads {
  int of_rows, of_columns, of_cells;
};

template <class Cells>
constexpr NormLoads loads_of_cells(NormPass pass) {
  switch (pass) {
    case NormPass::kSums: return {kLoads<Cells>, kLoadsOfColumns, 0};
    case NormPass::kNormalize: return {kLoads<Cells>, kLoads<Cells>, 0};
    default: return {kLoadsOfTwo, kLoadsOfTwoColumns<Cells>, kLoadsOfCells<Cells>};
  }
}

constexpr NormLoads loads_of(NormPass pass, Dtype dtype, bool is_wide) {
  if (!is_wide) return loads_of_cells<SingleCells>(pass);
  return dtype == Dtype::kFloat32 ? loads_of_cells<Float32Cells>(pass)
                                  : loads_of_cells<HalfCells<Float16Pair>>(pass);
}

}  // namespace norming

// Number of blocks of threads of a call.
inline uint32_t norm_blocks(const NormCall& call) {
  const bool updates = call.pass == NormPass::kNormalize && call.arguments.running_mean != nullptr;
  return call.arguments.grid.blocks + updates;
}

#ifndef __CUDACC__
// Run a call on the host, with the operations and their order of the kernels.
inline void run_norm(const NormCall& call) {
  norming::visit_body(call, [&](auto body) {
    using Body = decltype(body);
    for (uint32_t block = 0; block < norm_blocks(call); ++block) {
      typename Body::Shared shared;
      Body::run(call.arguments, block, norming::HostThreads{}, shared);
    }
    return 0;
  });
}
#endif

}  // namespace gpudist
