#include "opcodes.h"

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>

#include "thread.h"

namespace gpudist::ptx {

namespace {

using Table = std::map<std::string, Opcode>;

template <class T>
T as(uint64_t slot) {
  T value;
  std::memcpy(&value, &slot, sizeof(value));
  return value;
}

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

// The type in which integers wrap instead of overflowing.
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
// As hardware has it: division by zero gives all ones, its remainder the dividend.
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
T magnitude(T a) {
  return a < 0 ? subtract<T>(0, a) : a;
}
uint32_t reverse_bits(uint32_t a) {
  uint32_t reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (a >> i & 1u) << (31 - i);
  return reversed;
}

bool pred_and(bool a, bool b) {
  return a && b;
}
bool pred_or(bool a, bool b) {
  return a || b;
}
bool pred_xor(bool a, bool b) {
  return a != b;
}
bool pred_not(bool a) {
  return !a;
}

template <class T>
const Instruction* copy(const Instruction& at, Thread& thread) {
  return done(at, thread, source<T>(at, thread, 1));
}

// Shifts by the width or more leave nothing, or the sign.
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

// 32 bits of the 64 that two registers make.
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
bool is_greater_equal(T a, T b) {
  return a >= b;
}

template <class T>
const Instruction* select(const Instruction& at, Thread& thread) {
  const bool takes_first = source<bool>(at, thread, 3);
  return done(at, thread, source<T>(at, thread, takes_first ? 1 : 2));
}

// Integers, and integers to floats to nearest even, as C++ has it.
template <class To, class From>
const Instruction* convert(const Instruction& at, Thread& thread) {
  return done(at, thread, static_cast<To>(source<From>(at, thread, 1)));
}

float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const int exponent = half >> 10 & 31;
  const auto fraction = static_cast<float>(half & 1023u);
  const uint32_t payload = 0x7f800000u | (half & 1023u) << 13;
  if (exponent == 31) return as<float>(sign | payload);
  const float value =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024.0f + fraction, exponent - 25);
  return sign != 0 ? -value : value;
}

// To a format of fewer bits of exponent and fraction, ties to even.
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
uint16_t narrow_half(float value) {
  return round_to<10, -14, 15>(value);
}
uint16_t narrow_bfloat(float value) {
  return round_to<7, -126, 127>(value);
}
float widen_bfloat(uint16_t bits) {
  return as<float>(static_cast<uint64_t>(bits) << 16);
}

template <class To, class From, To (*F)(From)>
const Instruction* convert_by(const Instruction& at, Thread& thread) {
  return done(at, thread, F(source<From>(at, thread, 1)));
}
// Two at once: the first operand to the upper half.
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

const Instruction* permute_bytes(const Instruction& at, Thread& thread) {
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

// Any function of three bits, which the last operand tabulates.
const Instruction* logic_of_three(const Instruction& at, Thread& thread) {
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

// Slots: the register, then its parts, lowest first; or the parts, then the register.
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

// Slots: the base of the address, then the items.
template <class T, int kItems, Space kSpace>
const Instruction* load(const Instruction& at, Thread& thread) {
  T items[kItems];
  const uint64_t address = checked(at, thread, kSpace, false, sizeof(items));
  std::memcpy(items, reinterpret_cast<const void*>(address), sizeof(items));
  for (int i = 0; i < kItems; ++i) {
    // A wider register gets the sign of a signed item.
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

const Instruction* branch(const Instruction& at, Thread&) {
  return at.target;
}
const Instruction* do_nothing(const Instruction& at, Thread&) {
  return &at + 1;
}
const Instruction* finish(const Instruction&, Thread&) {
  return nullptr;
}
const Instruction* wait_for_block(const Instruction& at, Thread& thread) {
  thread.at_barrier = true;
  return &at + 1;
}

template <class T>
struct Type {
  using Of = T;
  const char* name;
};

template <class F>
void for_integers(F f) {
  f(Type<uint16_t>{"u16"}), f(Type<uint32_t>{"u32"}), f(Type<uint64_t>{"u64"});
  f(Type<int16_t>{"s16"}), f(Type<int32_t>{"s32"}), f(Type<int64_t>{"s64"});
}
template <class F>
void for_bits(F f) {
  f(Type<uint16_t>{"b16"}), f(Type<uint32_t>{"b32"}), f(Type<uint64_t>{"b64"});
}
template <class F>
void for_floats(F f) {
  f(Type<float>{"f32"}), f(Type<double>{"f64"});
}
template <class F>
void for_bytes(F f) {
  f(Type<uint8_t>{"u8"}), f(Type<int8_t>{"s8"}), f(Type<uint8_t>{"b8"});
}

template <class T>
void put_comparisons(Table& table, const std::string& type) {
  const auto put = [&](const char* name, auto with_none, auto with_and, auto with_or) {
    table[std::string("setp.") + name + "." + type] = {with_none, 3};
    table[std::string("setp.") + name + ".and." + type] = {with_and, 4};
    table[std::string("setp.") + name + ".or." + type] = {with_or, 4};
  };
#define GPUDIST_COMPARISON(name, function)                                  \
  put(name, compare<T, function<T>>, compare_and<T, function<T>, pred_and>, \
      compare_and<T, function<T>, pred_or>)
  GPUDIST_COMPARISON("eq", is_equal);
  GPUDIST_COMPARISON("ne", is_unequal);
  GPUDIST_COMPARISON("lt", is_less);
  GPUDIST_COMPARISON("le", is_less_equal);
  GPUDIST_COMPARISON("gt", is_greater);
  GPUDIST_COMPARISON("ge", is_greater_equal);
#undef GPUDIST_COMPARISON
}

void put_arithmetic(Table& table) {
  for_integers([&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["add." + name] = {binary<T, add<T>>, 3};
    table["sub." + name] = {binary<T, subtract<T>>, 3};
    table["mul.lo." + name] = {binary<T, multiply<T>>, 3};
    table["mul.hi." + name] = {binary<T, multiply_high<T>>, 3};
    table["mad.lo." + name] = {multiply_add<T, multiply<T>, T>, 4};
    table["mad.hi." + name] = {multiply_add<T, multiply_high<T>, T>, 4};
    table["div." + name] = {binary<T, divide<T>>, 3};
    table["rem." + name] = {binary<T, remainder<T>>, 3};
    table["min." + name] = {binary<T, minimum<T>>, 3};
    table["max." + name] = {binary<T, maximum<T>>, 3};
    table["neg." + name] = {unary<T, negate<T>>, 2};
    table["abs." + name] = {unary<T, magnitude<T>>, 2};
    table["shr." + name] = {shift_right<T>, 3};
    put_comparisons<T>(table, name);
  });
  table["mul.wide.u16"] = {multiply_wide<uint16_t, uint32_t>, 3};
  table["mul.wide.s16"] = {multiply_wide<int16_t, int32_t>, 3};
  table["mul.wide.u32"] = {multiply_wide<uint32_t, uint64_t>, 3};
  table["mul.wide.s32"] = {multiply_wide<int32_t, int64_t>, 3};
  table["mad.wide.u16"] = {multiply_wide_add<uint16_t, uint32_t>, 4};
  table["mad.wide.s16"] = {multiply_wide_add<int16_t, int32_t>, 4};
  table["mad.wide.u32"] = {multiply_wide_add<uint32_t, uint64_t>, 4};
  table["mad.wide.s32"] = {multiply_wide_add<int32_t, int64_t>, 4};
  for_floats([&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["add." + name] = {binary<T, add<T>>, 3};
    table["sub." + name] = {binary<T, subtract<T>>, 3};
    table["mul." + name] = {binary<T, multiply<T>>, 3};
    table["div." + name] = {binary<T, divide<T>>, 3};
    table["fma." + name] = {fused_multiply_add<T>, 4};
    table["setp.nan." + name] = {compare<T, is_unordered<T>>, 3};
    put_comparisons<T>(table, name);
  });
}

void put_bits(Table& table) {
  for_bits([&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["and." + name] = {binary<T, bit_and<T>>, 3};
    table["or." + name] = {binary<T, bit_or<T>>, 3};
    table["xor." + name] = {binary<T, bit_xor<T>>, 3};
    table["not." + name] = {unary<T, bit_not<T>>, 2};
    table["shl." + name] = {shift_left<T>, 3};
    table["shr." + name] = {shift_right<T>, 3};
    put_comparisons<T>(table, name);
  });
  table["and.pred"] = {binary<bool, pred_and>, 3};
  table["or.pred"] = {binary<bool, pred_or>, 3};
  table["xor.pred"] = {binary<bool, pred_xor>, 3};
  table["not.pred"] = {unary<bool, pred_not>, 2};
  table["bfi.b32"] = {insert_bits<uint32_t>, 5};
  table["bfi.b64"] = {insert_bits<uint64_t>, 5};
  table["bfe.u32"] = {extract_bits<uint32_t>, 4};
  table["bfe.s32"] = {extract_bits<int32_t>, 4};
  table["bfe.u64"] = {extract_bits<uint64_t>, 4};
  table["bfe.s64"] = {extract_bits<int64_t>, 4};
  table["brev.b32"] = {unary<uint32_t, reverse_bits>, 2};
  table["prmt.b32"] = {permute_bytes, 4};
  table["lop3.b32"] = {logic_of_three, 5};
  table["shf.l.wrap.b32"] = {funnel_shift<true, true>, 4};
  table["shf.l.clamp.b32"] = {funnel_shift<true, false>, 4};
  table["shf.r.wrap.b32"] = {funnel_shift<false, true>, 4};
  table["shf.r.clamp.b32"] = {funnel_shift<false, false>, 4};
}

void put_moves(Table& table) {
  const auto put = [&](auto type) {
    using T = typename decltype(type)::Of;
    table[std::string("mov.") + type.name] = {copy<T>, 2};
    table[std::string("selp.") + type.name] = {select<T>, 4};
  };
  for_integers(put), for_bits(put), for_floats(put);
  table["mov.pred"] = {copy<bool>, 2};
  table["mov.b32.pack2"] = {pack<2, 16>, 3};
  table["mov.b32.unpack2"] = {unpack<2, 16>, 3};
  table["mov.b64.pack2"] = {pack<2, 32>, 3};
  table["mov.b64.unpack2"] = {unpack<2, 32>, 3};
  table["mov.b64.pack4"] = {pack<4, 16>, 5};
  table["mov.b64.unpack4"] = {unpack<4, 16>, 5};
  // Memory has one space of addresses here.
  for (const char* const space : {"global", "shared", "param", "local", "const"}) {
    for (const char* const to : {".", ".to."}) {
      for (const char* const type : {".u64", ".u32"}) {
        table[std::string("cvta") + to + space + type] = {copy<uint64_t>, 2};
      }
    }
  }
}

void put_conversions(Table& table) {
  const auto put = [&](auto to) {
    const auto put_from = [&](auto from) {
      using To = typename decltype(to)::Of;
      using From = typename decltype(from)::Of;
      table[std::string("cvt.") + to.name + "." + from.name] = {convert<To, From>, 2};
    };
    for_integers(put_from), for_bytes(put_from);
  };
  for_integers(put), for_bytes(put);
  for_floats([&](auto to) {
    for_integers([&](auto from) {
      using To = typename decltype(to)::Of;
      using From = typename decltype(from)::Of;
      table[std::string("cvt.rn.") + to.name + "." + from.name] = {convert<To, From>, 2};
    });
  });
  table["cvt.f64.f32"] = {convert<double, float>, 2};
  table["cvt.rn.f32.f64"] = {convert<float, double>, 2};
  table["cvt.f32.f16"] = {convert_by<float, uint16_t, widen_half>, 2};
  table["cvt.rn.f16.f32"] = {convert_by<uint16_t, float, narrow_half>, 2};
  table["cvt.rn.f16x2.f32"] = {narrow_two<narrow_half>, 3};
  table["cvt.f32.bf16"] = {convert_by<float, uint16_t, widen_bfloat>, 2};
  table["cvt.rn.bf16.f32"] = {convert_by<uint16_t, float, narrow_bfloat>, 2};
  table["cvt.rn.bf16x2.f32"] = {narrow_two<narrow_bfloat>, 3};
}

template <Space kSpace>
void put_memory(Table& table, const std::string& space) {
  const auto put = [&](auto type) {
    using T = typename decltype(type)::Of;
    const std::string name = type.name;
    table["ld" + space + "." + name] = {load<T, 1, kSpace>, 2};
    table["ld" + space + ".v2." + name] = {load<T, 2, kSpace>, 3};
    table["ld" + space + ".v4." + name] = {load<T, 4, kSpace>, 5};
    table["st" + space + "." + name] = {store<T, 1, kSpace>, 2};
    table["st" + space + ".v2." + name] = {store<T, 2, kSpace>, 3};
    table["st" + space + ".v4." + name] = {store<T, 4, kSpace>, 5};
  };
  for_integers(put), for_bits(put), for_floats(put), for_bytes(put);
}

Table make_table() {
  Table table;
  put_arithmetic(table);
  put_bits(table);
  put_moves(table);
  put_conversions(table);
  put_memory<Space::kGeneric>(table, "");
  put_memory<Space::kParameter>(table, ".param");
  put_memory<Space::kGlobal>(table, ".global");
  put_memory<Space::kShared>(table, ".shared");
  table["bra"] = {branch, 0};
  table["nop"] = {do_nothing, 0};  // only in mutants
  table["ret"] = {finish, 0};
  table["exit"] = {finish, 0};
  for (const char* const name : {"bar.sync", "barrier.sync"}) table[name] = {wait_for_block, 1};
  return table;
}

}  // namespace

const std::map<std::string, Opcode>& opcodes() {
  static const Table table = make_table();
  return table;
}

}  // namespace gpudist::ptx
