// Arithmetic of random cells, in operations that every machine rounds alike, and the work of one
// thread of the kernels.
#pragma once

#include <type_traits>

#include "core/random_cells.h"

// Everything is inlined, so that the host compiles it for the lanes of the caller.
#ifdef __CUDACC__
#define GPUDIST_INLINED __host__ __device__ __forceinline__
#else
#define GPUDIST_INLINED [[gnu::always_inline]] inline
#endif

namespace gpudist {
namespace randomly {

// Constants of splitmix64 (Steele, Lea and Flood 2014).
constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;
constexpr uint64_t kFirstFactor = 0xBF58476D1CE4E5B9u, kSecondFactor = 0x94D049BB133111EBu;

// A bijection of 64-bit numbers whose results look independent.
GPUDIST_INLINED uint64_t mixed(uint64_t z) {
  z = (z ^ z >> 30) * kFirstFactor;
  z = (z ^ z >> 27) * kSecondFactor;
  return z ^ z >> 31;
}

// Both halves of a key.
struct Key {
  uint64_t first;
  uint64_t second;

  GPUDIST_INLINED static uint64_t of(uint64_t seed, uint64_t call) {
    return mixed(mixed(seed + kStep) ^ call);
  }
  GPUDIST_INLINED explicit Key(uint64_t key) : first(key), second(mixed(key + kStep)) {
#ifdef __CUDA_ARCH__
    // Otherwise the compiler computes it again for each granule.
    asm volatile("" : "+l"(second));
#endif
  }
  GPUDIST_INLINED explicit Key(const RandomKey& key)
      : Key(key.call != nullptr     ? of(key.seed != nullptr ? *key.seed : key.number, *key.call)
            : key.stored != nullptr ? *key.stored
                                    : key.number) {}
  GPUDIST_INLINED uint64_t number(uint64_t index) const {
    return mixed(mixed(index + first) ^ second);
  }
};

// Products and sums that no compiler may contract: each is rounded.
#ifdef __CUDA_ARCH__
GPUDIST_INLINED float times(float a, float b) {
  return __fmul_rn(a, b);
}
GPUDIST_INLINED double times(double a, double b) {
  return __dmul_rn(a, b);
}
GPUDIST_INLINED double plus(double a, double b) {
  return __dadd_rn(a, b);
}
GPUDIST_INLINED double root(double a) {
  return __dsqrt_rn(a);
}
GPUDIST_INLINED double over(double a, double b) {
  return __ddiv_rn(a, b);
}
#else
template <class T>
GPUDIST_INLINED T times(T a, T b) {
  return a * b;
}
GPUDIST_INLINED double plus(double a, double b) {
  return a + b;
}
GPUDIST_INLINED double root(double a) {
  return __builtin_sqrt(a);
}
GPUDIST_INLINED double over(double a, double b) {
  return a / b;
}
#endif

// c[0] + z * (c[1] + z * (...)).
template <int kTerms>
GPUDIST_INLINED double polynomial(const double (&c)[kTerms], double z) {
  double sum = c[kTerms - 1];
  for (int k = kTerms - 2; k >= 0; --k) sum = plus(times(sum, z), c[k]);
  return sum;
}

// Number 2^-53 to 1, in steps of 2^-53, and its logarithm.
GPUDIST_INLINED double logarithm_of_steps(uint64_t steps) {
  const auto x = static_cast<double>(static_cast<int64_t>(steps));
  const auto bits = bits_as<uint64_t>(x);
  // The mantissa, from the square root of 1/2 to that of 2, and the exponent.
  constexpr uint64_t kHalfRoot = 0x3FE6A09E667F3BCDu;
  const uint64_t above = bits - kHalfRoot;
  const auto exponent = static_cast<int64_t>(above) >> 52;
  const auto mantissa = bits_as<double>(bits - (above >> 52 << 52));
  // The series of the inverse hyperbolic tangent.
  constexpr double kSeries[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11,
                                1.0 / 13, 1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21};
  const double s = over(plus(mantissa, -1.0), plus(mantissa, 1.0)), z = times(s, s);
  const double rest = times(times(z, polynomial(kSeries, z)), s);
  const double of_mantissa = times(2.0, plus(s, rest));
  const auto power = static_cast<double>(static_cast<int32_t>(exponent) - 53);
  return plus(times(power, 0.6931471805599453), of_mantissa);
}

// Cosine of a part of a full turn, in steps of 2^-53.
GPUDIST_INLINED double cosine_of_steps(uint64_t steps) {
  // The nearest quarter, and the rest: at most an eighth of a turn.
  const uint64_t quarter = (steps + (uint64_t{1} << 50)) >> 51;
  const auto rest = static_cast<double>(static_cast<int64_t>(steps - (quarter << 51)));
  const double angle = times(rest, 6.283185307179586 * 0x1p-53), z = times(angle, angle);
  constexpr double kCosine[] = {1.0,
                                -1.0 / 2,
                                1.0 / 24,
                                -1.0 / 720,
                                1.0 / 40320,
                                -1.0 / 3628800,
                                1.0 / 479001600,
                                -1.0 / 87178291200,
                                1.0 / 20922789888000};
  constexpr double kSine[] = {
      -1.0 / 6,        1.0 / 120,        -1.0 / 5040,          1.0 / 362880,
      -1.0 / 39916800, 1.0 / 6227020800, -1.0 / 1307674368000, 1.0 / 355687428096000};
  const double cosine = polynomial(kCosine, z);
  const double sine = plus(angle, times(angle, times(z, polynomial(kSine, z))));
  const double found = (quarter & 1) != 0 ? sine : cosine;
  // cos, -sin, -cos, sin
  return ((quarter + 1) & 2) != 0 ? -found : found;
}

// Box and Muller 1958, from two uniform numbers.
GPUDIST_INLINED double normal(uint64_t number) {
  // The first must be above 0, so that the logarithm is finite.
  const double logarithm = logarithm_of_steps((number >> 11) + 1);
  const double cosine = cosine_of_steps(mixed(number + kStep) >> 11);
  return times(root(times(-2.0, logarithm)), cosine);
}

GPUDIST_INLINED bool is_kept(uint64_t number, int64_t dropped_below) {
  return static_cast<int64_t>(number) >= dropped_below;
}

// Uniform number in [0, 1) of `kBits` bits.
template <class Value, int kBits>
GPUDIST_INLINED Value uniform(uint64_t number) {
  constexpr Value kStepSize = Value(1) / static_cast<Value>(uint64_t{1} << kBits);
  if constexpr (kBits <= 24) {
    return static_cast<Value>(static_cast<int32_t>(number >> (64 - kBits))) * kStepSize;
  } else {
    return static_cast<Value>(static_cast<int64_t>(number >> (64 - kBits))) * kStepSize;
  }
}

// Formats of cells: how many there are in a granule, which one thread reads and writes at once.
// Stores are told whether a value may be NaN.
struct BoolCells {
  static constexpr int kItems = 4;
  using Value = bool;
  using Granule = uint32_t;

  template <bool>
  GPUDIST_INLINED static void store(char* output, int64_t at, bool value) {
    output[at] = value ? 1 : 0;
  }
  template <bool>
  GPUDIST_INLINED static Granule pack(const bool (&values)[kItems]) {
    uint32_t word = 0;
    for (int k = 0; k < kItems; ++k) word |= (values[k] ? 1u : 0u) << (8 * k);
    return word;
  }
};

template <class T>
struct PlainCells {
  static constexpr int kItems = 16 / sizeof(T), kBits = sizeof(T) == 4 ? 24 : 53;
  using Value = T;
  struct alignas(16) Granule {
    T items[kItems];
  };

  GPUDIST_INLINED static T load(const char* input, int64_t at) {
    return reinterpret_cast<const T*>(input)[at];
  }
  template <bool>
  GPUDIST_INLINED static void store(char* output, int64_t at, T value) {
    reinterpret_cast<T*>(output)[at] = value;
  }
  GPUDIST_INLINED static void unpack(const Granule& granule, T (&values)[kItems]) {
    for (int k = 0; k < kItems; ++k) values[k] = granule.items[k];
  }
  template <bool>
  GPUDIST_INLINED static Granule pack(const T (&values)[kItems]) {
    Granule granule;
    for (int k = 0; k < kItems; ++k) granule.items[k] = values[k];
    return granule;
  }
};

template <class Pair, int kMantissa>
struct NarrowCells {
  static constexpr int kItems = 8, kBits = kMantissa;
  using Value = float;
  using Granule = combining::Granule;

  GPUDIST_INLINED static float load(const char* input, int64_t at) {
    float values[2];
    Pair::widen(reinterpret_cast<const uint16_t*>(input)[at], values);
    return values[0];
  }
  template <bool kMayBeNan>
  GPUDIST_INLINED static void store(char* output, int64_t at, float value) {
    reinterpret_cast<uint16_t*>(output)[at] =
        static_cast<uint16_t>(Pair::template narrow<kMayBeNan>({value, 0.0f}));
  }
  GPUDIST_INLINED static void unpack(const Granule& granule, float (&values)[kItems]) {
    for (int w = 0; w < Granule::kWords; ++w) {
      float pair[2];
      Pair::widen(granule.words[w], pair);
      for (int k = 0; k < 2; ++k) values[2 * w + k] = pair[k];
    }
  }
  template <bool kMayBeNan>
  GPUDIST_INLINED static Granule pack(const float (&values)[kItems]) {
    Granule granule;
    for (int w = 0; w < Granule::kWords; ++w) {
      granule.words[w] = Pair::template narrow<kMayBeNan>({values[2 * w], values[2 * w + 1]});
    }
    return granule;
  }
};
using Float16Cells = NarrowCells<Float16Pair, 11>;
using Bfloat16Cells = NarrowCells<Bfloat16Pair, 8>;

// Whether a draw reads the input.
template <Draw kDraw>
constexpr bool kReads = kDraw == Draw::kBernoulli || kDraw == Draw::kScaled;
// Whether a result may be NaN.
template <Draw kDraw>
constexpr bool kMayBeNan = kDraw == Draw::kScaled;

// What becomes of a cell: its value, from the input's and from the cell's number.
template <Draw kDraw, class Cells>
struct Cell {
  using Value = typename Cells::Value;
  int64_t dropped_below;
  Value dropped, factor;

  GPUDIST_INLINED explicit Cell(const RandomArguments& arguments)
      : dropped_below(arguments.dropped_below) {
    if constexpr (sizeof(Value) == sizeof(double)) {
      dropped = arguments.wide_factors.dropped;
      factor = arguments.wide_factors.kept;
    } else {
      dropped = static_cast<Value>(arguments.factors.dropped);
      factor = static_cast<Value>(arguments.factors.kept);
    }
  }

  GPUDIST_INLINED Value operator()(Value input, uint64_t number) const {
    if constexpr (kDraw == Draw::kKept) {
      return is_kept(number, dropped_below);
    } else if constexpr (kDraw == Draw::kScaled) {
      return times(input, is_kept(number, dropped_below) ? factor : dropped);
    } else if constexpr (kDraw == Draw::kNormal) {
      return static_cast<Value>(normal(number));
    } else {
      const auto drawn = uniform<Value, Cells::kBits>(number);
      if constexpr (kDraw == Draw::kUniform) return drawn;
      return static_cast<Value>(drawn < input ? 1 : 0);
    }
  }
};

// Index of a cell and its place in the input; how many cells are left in its innermost row, which
// does not end if there is no other.
struct Place {
  uint64_t index;
  int64_t input = 0;
  uint32_t left = ~0u;

  GPUDIST_INLINED Place(const RandomArguments& arguments, uint32_t cell) : index(arguments.index) {
    const int32_t outermost = arguments.dims - 1;
    GPUDIST_NOT_UNROLLED
    for (int d = 0; d < outermost; ++d) {
      const Divisor shape = arguments.shape[d];
      const uint32_t outer = shape.quotient(cell), coordinate = cell - outer * shape.value;
      if (d == 0) left = shape.value - coordinate;
      add(arguments, d, coordinate);
      cell = outer;
    }
    add(arguments, outermost, cell);
  }

 private:
  GPUDIST_INLINED void add(const RandomArguments& arguments, int d, uint32_t coordinate) {
    index += coordinate * arguments.index_stride[d];
    if (!arguments.moves_granules) input += coordinate * arguments.input_stride[d];
  }
};

// Draw the cells of a granule, of which none is beyond the last; requires `moves_granules`.
template <Draw kDraw, class Cells>
GPUDIST_INLINED void draw_granule(const RandomArguments& arguments, const Key& key,
                                  const Cell<kDraw, Cells>& make, uint32_t first) {
  using Granule = typename Cells::Granule;
  constexpr uint32_t kItems = Cells::kItems;
  typename Cells::Value values[kItems] = {};
  if constexpr (kReads<kDraw>) {
    if (kDraw == Draw::kBernoulli && arguments.input == nullptr) {
      for (uint32_t k = 0; k < kItems; ++k) values[k] = make.factor;
    } else {
      const Granule granule = reinterpret_cast<const Granule*>(arguments.input)[first / kItems];
      Cells::unpack(granule, values);
    }
  }
  const Place place(arguments, first);
  const uint64_t step = arguments.index_stride[0];
  uint64_t index = place.index, jump = step;
  // From the last cell of a row to the first one of the next.
  if (place.left < kItems) {
    jump = Place(arguments, first + place.left).index - (index + (place.left - 1) * step);
  }
  for (uint32_t k = 0; k < kItems; ++k) {
    values[k] = make(values[k], key.number(index));
    index += k + 1 == place.left ? jump : step;
  }
  reinterpret_cast<Granule*>(arguments.output)[first / kItems] =
      Cells::template pack<kMayBeNan<kDraw>>(values);
}

template <Draw kDraw, class Cells>
GPUDIST_INLINED void draw_cell(const RandomArguments& arguments, const Key& key,
                               const Cell<kDraw, Cells>& make, uint32_t cell) {
  const Place place(arguments, cell);
  auto value = make.factor;
  if constexpr (kReads<kDraw>) {
    const int64_t at = arguments.moves_granules ? cell : place.input;
    if (arguments.input != nullptr) value = Cells::load(arguments.input, at);
  }
  Cells::template store<kMayBeNan<kDraw>>(arguments.output, cell,
                                          make(value, key.number(place.index)));
}

// Work of thread `thread` of block `block`: one granule of each of several tiles or, where a tile
// is not whole granules, as many single cells.
template <Draw kDraw, class Cells>
GPUDIST_INLINED void draw_cells(const RandomArguments& arguments, uint32_t block, uint32_t thread) {
  constexpr uint32_t kThreads = RandomArguments::kThreads, kTile = kThreads * Cells::kItems;
  const Key key(arguments.key);
  if (arguments.stores_key != nullptr && block == 0 && thread == 0) {
    *arguments.stores_key = key.first;
  }
  const Cell<kDraw, Cells> make(arguments);
  // Every block has a tile.
  uint32_t start = block * arguments.tiles * kTile, tile = 0;
  do {
    const uint32_t stop = start + kTile;
    if (arguments.moves_granules && stop <= arguments.cells) {
      draw_granule<kDraw, Cells>(arguments, key, make, start + thread * Cells::kItems);
    } else {
      const uint32_t end = stop <= arguments.cells ? stop : arguments.cells;
      GPUDIST_NOT_UNROLLED
      for (uint32_t cell = start + thread; cell < end; cell += kThreads) {
        draw_cell<kDraw, Cells>(arguments, key, make, cell);
      }
    }
    start = stop;
  } while (++tile < arguments.tiles && start < arguments.cells);
}

// Call `f` with the draw and the cells of a launch, as types.
template <class F>
auto with_types(Draw draw, Dtype dtype, F f) {
  const auto with_cells = [&](auto kind) {
    switch (dtype) {
      case Dtype::kFloat16: return f(kind, Float16Cells{});
      case Dtype::kBfloat16: return f(kind, Bfloat16Cells{});
      case Dtype::kFloat64: return f(kind, PlainCells<double>{});
      default: return f(kind, PlainCells<float>{});
    }
  };
  switch (draw) {
    case Draw::kKept: return f(std::integral_constant<Draw, Draw::kKept>{}, BoolCells{});
    case Draw::kUniform: return with_cells(std::integral_constant<Draw, Draw::kUniform>{});
    case Draw::kNormal: return with_cells(std::integral_constant<Draw, Draw::kNormal>{});
    case Draw::kBernoulli: return with_cells(std::integral_constant<Draw, Draw::kBernoulli>{});
    default: return with_cells(std::integral_constant<Draw, Draw::kScaled>{});
  }
}

}  // namespace randomly
}  // namespace gpudist
