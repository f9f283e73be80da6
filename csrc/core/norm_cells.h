// Cells and parameters in memory, and how many of them a thread loads together.
//
// Bodies of kernels take the formats of the block, `Cells`, and of the normalized block, `Results`.
// A gradient has the format of what it is the gradient by.
#pragma once

#include <type_traits>

#include "core/half.h"
#include "core/norm_kernels.h"

namespace gpudist {
namespace norming {

template <class Word>
GPUDIST_HOST_DEVICE inline Word& word_at(char* address) {
  return *reinterpret_cast<Word*>(address);
}
template <class Word>
GPUDIST_HOST_DEVICE inline const Word& word_at(const char* address) {
  return *reinterpret_cast<const Word*>(address);
}

// Cells of float64 are computed in float64, and have parameters of float64; all others in float32.
template <class Value>
constexpr bool kIsDouble = std::is_same_v<Value, double>;

template <class Value = float>
GPUDIST_HOST_DEVICE inline Value value_at(const char* from, int64_t item, Dtype dtype) {
  if constexpr (kIsDouble<Value>) return word_at<double>(from + 8 * item);
  if (dtype == Dtype::kFloat32) return word_at<float>(from + 4 * item);
  const uint16_t bits = word_at<uint16_t>(from + 2 * item);
  return dtype == Dtype::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
}
GPUDIST_HOST_DEVICE inline void put_value(char* to, int64_t item, Dtype, double value) {
  word_at<double>(to + 8 * item) = value;
}
GPUDIST_HOST_DEVICE inline void put_value(char* to, int64_t item, Dtype dtype, float value) {
  if (dtype == Dtype::kFloat32) {
    word_at<float>(to + 4 * item) = value;
  } else {
    const float pair[2] = {value, 0};
    word_at<uint16_t>(to + 2 * item) = static_cast<uint16_t>(
        dtype == Dtype::kFloat16 ? Float16Pair::narrow(pair) : Bfloat16Pair::narrow(pair));
  }
}

GPUDIST_HOST_DEVICE inline float fused(float a, float b, float c) {
  return fmaf(a, b, c);
}
GPUDIST_HOST_DEVICE inline double fused(double a, double b, double c) {
  return fma(a, b, c);
}

struct Float32Cells {
  using Value = float;
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
  using Value = float;
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

// Single cells of a dtype of at most 32 bits, where several cannot be loaded together.
struct SingleCells {
  using Value = float;
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

struct Float64Cells {
  using Value = double;
  static constexpr int kWidth = 1, kBytes = 8;
  using Raw = double;

  GPUDIST_HOST_DEVICE static Raw load(const char* from, int64_t item, Dtype dtype) {
    return value_at<double>(from, item, dtype);
  }
  GPUDIST_HOST_DEVICE static void widen(const Raw& raw, Dtype, double (&values)[1]) {
    values[0] = raw;
  }
  GPUDIST_HOST_DEVICE static void store(char* to, int64_t item, Dtype dtype,
                                        const double (&values)[1]) {
    put_value(to, item, dtype, values[0]);
  }
};

// Number of loads of one tensor that a thread has in flight: as many as the registers allow.
template <class Cells>
constexpr int kLoads = Cells::kWidth == 1 ? 8 : 16 / Cells::kBytes;
constexpr int kLoadsOfColumns = 4;
// Of each of two tensors.
constexpr int kLoadsOfTwo = 4;
template <class Cells, class Results>
constexpr int kLoadsOfTwoColumns = Cells::kBytes == 8 ? 2 : 16 / (Cells::kBytes + Results::kBytes);
// Those of a tile of lines, whose factors are in shared memory.
template <class Cells, class Results>
constexpr int kLoadsOfCells =
    std::is_same_v<Cells, SingleCells> ? 4 : kLoadsOfTwoColumns<Cells, Results>;

// Parameters of `kWidth` cells.
template <class Value, int kWidth>
GPUDIST_HOST_DEVICE inline void load_parameters(const char* from, int64_t item, Dtype dtype,
                                                Value (&values)[kWidth]) {
  if constexpr (kWidth == 1) {
    values[0] = value_at<Value>(from, item, dtype);
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

}  // namespace norming
}  // namespace gpudist
