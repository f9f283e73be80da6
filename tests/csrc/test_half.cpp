// 16-bit floats compared with double arithmetic: round trips of every value, and rounding to even.
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "core/half.h"
#include "test.h"

namespace {

using gpudist::bits_as;

struct Format {
  int mantissa_bits;
  int least_exponent;  // smallest exponent of a normal number
  double largest;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
};

const Format kHalf{10, -14, 65504.0, gpudist::float16_to_float, gpudist::float_to_float16};
const Format kBrain{7, -126, 3.3895313892515355e38, gpudist::bfloat16_to_float,
                    gpudist::float_to_bfloat16};

// Nearest number of the format as a double, ties to even like std::nearbyint.
double rounded(double value, const Format& format) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.least_exponent);
  const double unit = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double nearest = std::nearbyint(value / unit) * unit;
  if (std::fabs(nearest) > format.largest) {
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
  return nearest;
}

double value_of(uint16_t bits, const Format& format) {
  const int exponent_bits = 15 - format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits >> format.mantissa_bits) & ((1 << exponent_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const int normal = exponent != 0 ? 1 << format.mantissa_bits : 0;
  return sign * std::ldexp(mantissa + normal, std::max(exponent, 1) - 1 + format.least_exponent -
                                                  format.mantissa_bits);
}

void every_value_there_and_back(const Format& format) {
  long wrong_values = 0, wrong_bits = 0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const uint16_t narrow = static_cast<uint16_t>(bits);
    const float wide = format.widen(narrow);
    const double expected = value_of(narrow, format);
    if (std::isnan(expected)) {
      wrong_values += !std::isnan(wide);
      wrong_bits += !std::isnan(format.widen(format.narrow(wide)));
      continue;
    }
    wrong_values += wide != expected || std::signbit(wide) != std::signbit(expected);
    wrong_bits += format.narrow(wide) != narrow;
  }
  CHECK(wrong_values == 0);
  CHECK(wrong_bits == 0);
}

void rounds_to_even(const Format& format) {
  std::mt19937_64 random(7);
  long wrong = 0;
  const auto compare = [&](float value) {
    const double actual = format.widen(format.narrow(value));
    const double expected = rounded(value, format);
    const bool fine = std::isnan(value)
                          ? std::isnan(actual)
                          : actual == expected && std::signbit(actual) == std::signbit(expected);
    wrong += !fine;
  };
  for (int i = 0; i < 500'000; ++i) {
    compare(bits_as<float>(static_cast<uint32_t>(random())));
    // Values around the midpoints between neighbours, where rounding changes direction.
    const uint32_t low = static_cast<uint16_t>(random()) & 0x7fffu;
    const float halfway =
        bits_as<float>(bits_as<uint32_t>(format.widen(static_cast<uint16_t>(low))) +
                       (1u << (22 - format.mantissa_bits)));
    for (float value : {halfway, std::nextafter(halfway, 0.0f), std::nextafter(halfway, 1e38f)}) {
      compare(value);
      compare(-value);
    }
  }
  for (int exponent = -150; exponent < 128; ++exponent) {
    for (float mantissa : {1.0f, 1.5f, 1.25f, 1.999f}) {
      compare(std::ldexp(mantissa, exponent));
    }
  }
  CHECK(wrong == 0);
}

}  // namespace

void test_half() {
  for (const Format& format : {kHalf, kBrain}) {
    every_value_there_and_back(format);
    rounds_to_even(format);
  }
}
