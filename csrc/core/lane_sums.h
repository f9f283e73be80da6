// Two sums over the items of a line in one pass, in as many lanes as the target of the function
// that inlines them has.
#pragma once

#include <cstdint>
#include <cstring>

#define GPUDIST_INLINE [[gnu::always_inline]] inline

namespace gpudist {

struct LineSums {
  double first = 0;
  double second = 0;
};

// One item of a line, or a vector of them.
template <class Items, class T>
GPUDIST_INLINE void load(const T* from, Items& items) {
  std::memcpy(&items, from, sizeof(items));
}

// Terms of the sum of `x - shift` and of the sum of its squares.
template <class T>
struct ShiftedTerms {
  const T* x;
  T shift;

  template <class Items>
  GPUDIST_INLINE void at(int64_t i, Items& first, Items& second) const {
    load(x + i, first);
    first -= shift;
    second = first * first;
  }
};

// Terms of the sum of the gradient and of the sum of its products with `x - shift`.
template <class T, bool kWeighted>
struct Products {
  const T* gradient;
  const T* x;
  const T* weight;
  T shift;

  template <class Items>
  GPUDIST_INLINE void at(int64_t i, Items& first, Items& second) const {
    load(x + i, second);
    load(gradient + i, first);
    if constexpr (kWeighted) {
      Items factor;
      load(weight + i, factor);
      first *= factor;
    }
    second = (second - shift) * first;
  }
};

template <class T, class Terms>
GPUDIST_INLINE LineSums sums_of(const Terms& terms, int64_t count) {
  typedef T Vector __attribute__((vector_size(32)));
  constexpr int64_t kItems = sizeof(Vector) / sizeof(T);
  constexpr int kVectors = 4;
  Vector first[kVectors] = {}, second[kVectors] = {}, a, b;
  int64_t i = 0;
  for (; i + kVectors * kItems <= count; i += kVectors * kItems) {
    for (int v = 0; v < kVectors; ++v) {
      terms.at(i + v * kItems, a, b);
      first[v] += a;
      second[v] += b;
    }
  }
  for (; i + kItems <= count; i += kItems) {
    terms.at(i, a, b);
    first[0] += a;
    second[0] += b;
  }
  LineSums sums;
  for (; i < count; ++i) {
    T one, other;
    terms.at(i, one, other);
    sums.first += static_cast<double>(one);
    sums.second += static_cast<double>(other);
  }
  const Vector firsts = (first[0] + first[1]) + (first[2] + first[3]);
  const Vector seconds = (second[0] + second[1]) + (second[2] + second[3]);
  for (int64_t item = 0; item < kItems; ++item) {
    sums.first += static_cast<double>(firsts[item]);
    sums.second += static_cast<double>(seconds[item]);
  }
  return sums;
}

}  // namespace gpudist
