// Cells and parameters in memory, and how many of them a thread loads together.
//
// Bodies of kernels take the formats of the block, `Cells`, and of the normalized block, `Results`.
// A gradient has the format of what it is the gradient by.
#pragma once

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

GPUDIST_HOST_DEVICE inline float value_at(const char* from, int64_t item, Dtype dtype) {
  if (dtype == Dtype::kFloat32) return word_at<float>(from + 4 * item);
  const uint16_t bits = word_at<uint16_t>(from + 2 * item);
  return dtype == Dtype::kFloat16 ? float16_to_float(bits) : bfloat16_to_float(bits);
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
template <class Cells, class Results>
constexpr int kLoadsOfTwoColumns = 16 / (Cells::kBytes + Results::kBytes);
template <class Cells, class Results>
constexpr int kLoadsOfCells = Cells::kWidth == 1 ? 4 : kLoadsOfTwoColumns<Cells, Results>;

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

}  // namespace norming
}  // namespace gpudist
