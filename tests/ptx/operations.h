// Semantics of the opcodes.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "formats.h"
#include "thread.h"

namespace gpudist::ptx::operations {

template <class T>
uint64_t slot_of(T value) {
  uint64_t slot = 0;
  std::memcpy(&slot, &value, sizeof(value));
  return slot;
}

template <class T>
T source(const Instruction& at, const Thread& thread, int operand) {
  return as<T>(thread.slots[at.slots[operand]]);
}

template <class T>
const Instruction* done(const Instruction& at, Thread& thread, T result) {
  thread.slots[at.slots[0]] = slot_of(result);
  return &at + 1;
}

// Type in which integer arithmetic wraps instead of overflowing.
template <class T, bool = std::is_integral_v<T>>
struct WrappingOf {
  using Type = std::make_unsigned_t<T>;
};
template <class T>
struct WrappingOf<T, false> {
  using Type = T;
};
template <class T>
using Wrapping = typename WrappingOf<T>::Type;

template <class T>
constexpr unsigned kBits = 8 * sizeof(T);

// d = F(a, b) of type T.
template <class T, T (*F)(T, T)>
const Instruction* binary(const Instruction& at, Thread& thread) {
  return done(at, thread, F(source<T>(at, thread, 1), source<T>(at, thread, 2)));
}

template <class T, T (*F)(T)>
const Instruction* unary(const Instruction& at, Thread& thread) {
  return done(at, thread, F(source<T>(at, thread, 1)));
}

template <class T>
T add(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
}
template <class T>
T subtract(T a, T b) {
  return static_cast<T>(static_cast<Wrapping<T>>(a) - static_cast<Wrapping<T>>(b));
}
template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}
// The upper half of a product.
template <class T>
T multiply_high(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> kBits<T>);
}
// As in hardware: division by zero yields all ones, and the remainder is the dividend.
template <class T>
T divide(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    if (b == 0) return static_cast<T>(~T{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return subtract<T>(0, a);
  }
  return a / b;
}
template <class T>
T remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return a % b;
}
template <class T>
T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T bit_and(T a, T b) {
  return a & b;
}
template <class T>
T bit_or(T a, T b) {
  return a | b;
}
template <class T>
T bit_xor(T a, T b) {
  return a ^ b;
}
template <class T>
T bit_not(T a) {
  return static_cast<T>(~a);
}
template <class T>
T negate(T a) {
  return subtract<T>(0, a);
}
template <class T>
T negative(T a) {
  return -a;
}
template <class T>
T square_root(T a) {
  return std::sqrt(a);
}
inline double reciprocal(double a) {
  return 1 / a;
}
template <class T>
T magnitude(T a) {
  return a < 0 ? subtract<T>(0, a) : a;
}
inline uint32_t reverse_bits(uint32_t a) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
  return reversed;
}

inline bool pred_and(bool a, bool b) {
  return a && b;
}
inline bool pred_or(bool a, bool b) {
  return a || b;
}
inline bool pred_xor(bool a, bool b) {
  return a != b;
}
inline bool pred_not(bool a) {
  return !a;
}

template <class T>
const Instruction* copy(const Instruction& at, Thread& thread) {
  return done(at, thread, source<T>(at, thread, 1));
}

// Shifting by the width or more gives zero, or the sign bit everywhere.
template <class T>
const Instruction* shift_left(const Instruction& at, Thread& thread) {
  const auto by = source<uint32_t>(at, thread, 2);
  const auto value = source<Wrapping<T>>(at, thread, 1);
  return done(at, thread, static_cast<T>(by >= kBits<T> ? 0 : static_cast<uint64_t>(value) << by));
}
template <class T>
const Instruction* shift_right(const Instruction& at, Thread& thread) {
  const auto by = source<uint32_t>(at, thread, 2);
  const auto value = source<T>(at, thread, 1);
  if (by >= kBits<T>) return done(at, thread, static_cast<T>(value < 0 ? -1 : 0));
  return done(at, thread, static_cast<T>(value >> by));
}

// Shift two registers as one 64-bit value and return 32 bits of it.
template <bool kLeft, bool kWraps>
const Instruction* funnel_shift(const Instruction& at, Thread& thread) {
  const uint64_t both = static_cast<uint64_t>(source<uint32_t>(at, thread, 2)) << 32 |
                        source<uint32_t>(at, thread, 1);
  uint32_t by = source<uint32_t>(at, thread, 3);
  by = kWraps ? by & 31 : minimum<uint32_t>(by, 32);
  return done(at, thread, static_cast<uint32_t>(kLeft ? both << by >> 32 : both >> by));
}

template <class T, class Wide>
const Instruction* multiply_wide(const Instruction& at, Thread& thread) {
  return done(at, thread, multiply<Wide>(source<T>(at, thread, 1), source<T>(at, thread, 2)));
}
template <class T, T (*F)(T, T), class Sum>
const Instruction* multiply_add(const Instruction& at, Thread& thread) {
  const Sum product = F(source<T>(at, thread, 1), source<T>(at, thread, 2));
  return done(at, thread, add<Sum>(product, source<Sum>(at, thread, 3)));
}
template <class T, class Wide>
const Instruction* multiply_wide_add(const Instruction& at, Thread& thread) {
  const Wide product = multiply<Wide>(source<T>(at, thread, 1), source<T>(at, thread, 2));
  return done(at, thread, add<Wide>(product, source<Wide>(at, thread, 3)));
}
template <class T>
const Instruction* fused_multiply_add(const Instruction& at, Thread& thread) {
  return done(
      at, thread,
      std::fma(source<T>(at, thread, 1), source<T>(at, thread, 2), source<T>(at, thread, 3)));
}

template <class T, bool (*F)(T, T)>
const Instruction* compare(const Instruction& at, Thread& thread) {
  return done(at, thread, F(source<T>(at, thread, 1), source<T>(at, thread, 2)));
}
template <class T, bool (*F)(T, T), bool (*kWith)(bool, bool)>
const Instruction* compare_and(const Instruction& at, Thread& thread) {
  const bool found = F(source<T>(at, thread, 1), source<T>(at, thread, 2));
  return done(at, thread, kWith(found, source<bool>(at, thread, 3)));
}
template <class T>
bool is_equal(T a, T b) {
  return a == b;
}
template <class T>
bool is_unequal(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return a < b || a > b;
  return a != b;
}
template <class T>
bool is_less(T a, T b) {
  return a < b;
}
template <class T>
bool is_less_equal(T a, T b) {
  return a <= b;
}
template <class T>
bool is_greater(T a, T b) {
  return a > b;
}
template <class T>
bool is_unordered(T a, T b) {
  return std::isnan(a) || std::isnan(b);
}
template <class T>
bool is_ordered(T a, T b) {
  return !is_unordered(a, b);
}
template <class T>
bool is_greater_equal(T a, T b) {
  return a >= b;
}

// Comparisons that hold for NaN are the opposites of those that do not.
template <class T, bool (*F)(T, T)>
bool is_not(T a, T b) {
  return !F(a, b);
}

template <class T>
const Instruction* select(const Instruction& at, Thread& thread) {
  const bool takes_first = source<bool>(at, thread, 3);
  return done(at, thread, source<T>(at, thread, takes_first ? 1 : 2));
}

// Conversions of integers, and of integers to floats, to nearest even as in C++.
template <class To, class From>
const Instruction* convert(const Instruction& at, Thread& thread) {
  return done(at, thread, static_cast<To>(source<From>(at, thread, 1)));
}

inline const Instruction* round_to_float(const Instruction& at, Thread& thread) {
  const auto value = source<double>(at, thread, 1);
  count_rounded(thread, value);
  return done(at, thread, static_cast<float>(value));
}

template <class To, class From, To (*F)(From)>
const Instruction* convert_by(const Instruction& at, Thread& thread) {
  return done(at, thread, F(source<From>(at, thread, 1)));
}
// Convert two values; the first operand goes to the upper half.
template <uint16_t (*F)(float)>
const Instruction* narrow_two(const Instruction& at, Thread& thread) {
  const uint32_t upper = F(source<float>(at, thread, 1));
  return done(at, thread, upper << 16 | F(source<float>(at, thread, 2)));
}

template <class T>
const Instruction* insert_bits(const Instruction& at, Thread& thread) {
  const auto from = source<T>(at, thread, 1), into = source<T>(at, thread, 2);
  const uint32_t first = source<uint32_t>(at, thread, 3) & 255u;
  const uint32_t count = source<uint32_t>(at, thread, 4) & 255u;
  if (first >= kBits<T> || count == 0) return done(at, thread, into);
  const T mask = (count >= kBits<T> ? ~T{0} : (T{1} << count) - 1) << first;
  return done(at, thread, static_cast<T>((into & ~mask) | (from << first & mask)));
}
template <class T>
const Instruction* extract_bits(const Instruction& at, Thread& thread) {
  using Bits = Wrapping<T>;
  const auto from = source<T>(at, thread, 1);
  const uint32_t first = source<uint32_t>(at, thread, 2) & 255u;
  const uint32_t count = source<uint32_t>(at, thread, 3) & 255u;
  const uint32_t last = minimum<uint32_t>(first + count - 1, kBits<T> - 1);
  if (count == 0) return done(at, thread, T{0});
  const bool sign = std::is_signed_v<T> && (static_cast<Bits>(from) >> last & 1);
  Bits bits = first >= kBits<T> ? 0 : static_cast<Bits>(from) >> first;
  if (count < kBits<T>) {
    const Bits mask = (Bits{1} << count) - 1;
    bits &= mask;
    if (sign) bits |= ~mask;
  }
  return done(at, thread, bits);
}

inline const Instruction* permute_bytes(const Instruction& at, Thread& thread) {
  const uint64_t both = static_cast<uint64_t>(source<uint32_t>(at, thread, 2)) << 32 |
                        source<uint32_t>(at, thread, 1);
  const auto selectors = source<uint32_t>(at, thread, 3);
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15u;
    auto byte = static_cast<uint8_t>(both >> (8 * (selector & 7u)));
    if (selector & 8u) byte = byte & 0x80u ? 0xff : 0;
    result |= static_cast<uint32_t>(byte) << (8 * i);
  }
  return done(at, thread, result);
}

// Any bitwise function of three operands; the last operand is its truth table.
inline const Instruction* logic_of_three(const Instruction& at, Thread& thread) {
  const auto table = source<uint32_t>(at, thread, 4);
  uint32_t result = 0;
  for (int i = 0; i < 32; ++i) {
    uint32_t row = 0;
    for (int operand = 1; operand <= 3; ++operand) {
      row = row << 1 | (source<uint32_t>(at, thread, operand) >> i & 1u);
    }
    result |= (table >> row & 1u) << i;
  }
  return done(at, thread, result);
}

// Slots: the register and its parts, lowest first; or the parts and the register.
template <int kParts, int kPartBits>
const Instruction* pack(const Instruction& at, Thread& thread) {
  constexpr uint64_t kMask = (uint64_t{1} << kPartBits) - 1;
  uint64_t value = 0;
  for (int i = 0; i < kParts; ++i) {
    value |= (source<uint64_t>(at, thread, 1 + i) & kMask) << (i * kPartBits);
  }
  return done(at, thread, value);
}
template <int kParts, int kPartBits>
const Instruction* unpack(const Instruction& at, Thread& thread) {
  constexpr uint64_t kMask = (uint64_t{1} << kPartBits) - 1;
  const auto value = source<uint64_t>(at, thread, kParts);
  for (int i = 0; i < kParts; ++i) {
    thread.slots[at.slots[i]] = value >> (i * kPartBits) & kMask;
  }
  return &at + 1;
}

// Slots: the base address, then the items.
template <class T, int kItems, Space kSpace>
const Instruction* load(const Instruction& at, Thread& thread) {
  T items[kItems];
  const uint64_t address = checked(at, thread, kSpace, false, sizeof(items));
  std::memcpy(items, reinterpret_cast<const void*>(address), sizeof(items));
  for (int i = 0; i < kItems; ++i) {
    // A register wider than a signed item is sign-extended.
    if constexpr (std::is_signed_v<T> && std::is_integral_v<T>) {
      thread.slots[at.slots[1 + i]] = static_cast<uint64_t>(static_cast<int64_t>(items[i]));
    } else {
      thread.slots[at.slots[1 + i]] = slot_of(items[i]);
    }
  }
  return &at + 1;
}
template <class T, int kItems, Space kSpace>
const Instruction* store(const Instruction& at, Thread& thread) {
  T items[kItems];
  for (int i = 0; i < kItems; ++i) items[i] = source<T>(at, thread, 1 + i);
  const uint64_t address = checked(at, thread, kSpace, true, sizeof(items));
  std::memcpy(reinterpret_cast<void*>(address), items, sizeof(items));
  return &at + 1;
}

inline const Instruction* branch(const Instruction& at, Thread&) {
  return at.target;
}
template <int kCount>
const Instruction* leave_random_bits(const Instruction& at, Thread& thread) {
  for (int i = 0; i < kCount; ++i) thread.slots[at.slots[i]] = random_word(thread);
  return &at + 1;
}
inline const Instruction* do_nothing(const Instruction& at, Thread&) {
  return &at + 1;
}
inline const Instruction* finish(const Instruction&, Thread&) {
  return nullptr;
}
inline const Instruction* wait_for_block(const Instruction& at, Thread& thread) {
  thread.at_barrier = true;
  return &at + 1;
}

}  // namespace gpudist::ptx::operations
