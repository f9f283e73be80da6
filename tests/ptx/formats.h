// Conversions of 16-bit floats as in hardware. Written independently of csrc/core/half.h, which
// they verify.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace gpudist::ptx::operations {

template <class T>
T as(uint64_t slot) {
  T value;
  std::memcpy(&value, &slot, sizeof(value));
  return value;
}

inline float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const int exponent = half >> 10 & 31;
  const auto fraction = static_cast<float>(half & 1023u);
  const uint32_t payload = 0x7f800000u | (half & 1023u) << 13;
  if (exponent == 31) return as<float>(sign | payload);
  const float value =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0f + fraction, exponent - 25);
  return sign != 0 ? -value : value;
}

// Convert to a format with fewer exponent and fraction bits, ties to even.
template <int kFraction, int kLeast, int kGreatest>
uint16_t round_to(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  constexpr uint32_t kInfinity = (kGreatest - kLeast + 2u) << kFraction;
  if (std::isnan(value)) return 0x7fff;
  if (std::isinf(value)) return static_cast<uint16_t>(sign | kInfinity);
  if (value == 0) return sign;
  int exponent = std::max(std::ilogb(value), kLeast);
  double units = std::nearbyint(std::ldexp(std::fabs(value), kFraction - exponent));
  if (units >= std::ldexp(2, kFraction)) {
    units /= 2;
    ++exponent;
  }
  if (exponent > kGreatest) return static_cast<uint16_t>(sign | kInfinity);
  const auto bits = static_cast<uint32_t>(exponent - kLeast) << kFraction;
  return static_cast<uint16_t>(sign | (bits + static_cast<uint32_t>(units)));
}
inline uint16_t narrow_half(float value) {
  return round_to<10, -14, 15>(value);
}
inline uint16_t narrow_bfloat(float value) {
  return round_to<7, -126, 127>(value);
}
inline float widen_bfloat(uint16_t bits) {
  return as<float>(static_cast<uint64_t>(bits) << 16);
}

}  // namespace gpudist::ptx::operations
