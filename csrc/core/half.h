// Conversions between float32 and the 16-bit floats, rounding to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/box.h"

namespace gpudist {

template <class To, class From>
GPUDIST_HOST_DEVICE inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

GPUDIST_HOST_DEVICE inline float bfloat16_to_float(uint16_t bits) {
  return bits_as<float>(static_cast<uint32_t>(bits) << 16);
}

GPUDIST_HOST_DEVICE inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

GPUDIST_HOST_DEVICE inline float float16_to_float(uint16_t half) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0x1fu) return bits_as<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return bits_as<float>(sign);
    exponent = 1;
    while (!(mantissa & 0x400u)) {
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 0x3ffu;
  }
  return bits_as<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
#endif
}

GPUDIST_HOST_DEVICE inline uint16_t float_to_float16(float value) {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 aligns the subnormal's last bit with the float's, so that the addition rounds.
    const float aligned = bits_as<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_as<uint32_t>(aligned) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | (rounded >> 13));
}

// Pack two 16-bit floats in a word, the first in the lower half.
GPUDIST_HOST_DEVICE inline uint32_t pair_of(uint16_t first, uint16_t second) {
  return first | static_cast<uint32_t>(second) << 16;
}

// Replace the device's NaNs in `word` by the host's. The sign of a NaN is not kept.
GPUDIST_HOST_DEVICE inline uint32_t with_nan(uint32_t word, const float (&values)[2],
                                             uint32_t nan) {
  if (values[0] != values[0]) word = (word & 0xffff0000u) | nan;
  if (values[1] != values[1]) word = (word & 0x0000ffffu) | nan << 16;
  return word;
}

struct Float16Pair {
  GPUDIST_HOST_DEVICE static void widen(uint32_t word, float (&values)[2]) {
    values[0] = float16_to_float(static_cast<uint16_t>(word));
    values[1] = float16_to_float(static_cast<uint16_t>(word >> 16));
  }
  // `kMayBeNan`: whether a value may be NaN.
  template <bool kMayBeNan = true>
  GPUDIST_HOST_DEVICE static uint32_t narrow(const float (&values)[2]) {
#ifdef __CUDA_ARCH__
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return kMayBeNan ? with_nan(word, values, 0x7e00) : word;
#else
    return pair_of(float_to_float16(values[0]), float_to_float16(values[1]));
#endif
  }
};

struct Bfloat16Pair {
  GPUDIST_HOST_DEVICE static void widen(uint32_t word, float (&values)[2]) {
    values[0] = bits_as<float>(word << 16);
    values[1] = bits_as<float>(word & 0xffff0000u);
  }
  // `kMayBeNan`: whether a value may be NaN.
  template <bool kMayBeNan = true>
  GPUDIST_HOST_DEVICE static uint32_t narrow(const float (&values)[2]) {
#ifdef __CUDA_ARCH__
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return kMayBeNan ? with_nan(word, values, 0x7fc0) : word;
#else
    return pair_of(float_to_bfloat16(values[0]), float_to_bfloat16(values[1]));
#endif
  }
};

}  // namespace gpudist
