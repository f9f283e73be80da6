// Random launches of the combine kernel, and their results computed by loops over the cells.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "core/combine_plan.h"

namespace gpudist::combine_cases {

// Source of all random choices here.
extern std::mt19937_64 random_bits;

int64_t between(int64_t low, int64_t high);

constexpr Dtype kDtypes[] = {Dtype::kBool,    Dtype::kUint8,     Dtype::kInt8,
                             Dtype::kInt16,   Dtype::kInt32,     Dtype::kInt64,
                             Dtype::kFloat16, Dtype::kBfloat16,  Dtype::kFloat32,
                             Dtype::kFloat64, Dtype::kComplex64, Dtype::kComplex128};

// Value of cells without a summand.
constexpr double kFill = 3;

// A buffer whose address is a multiple of `alignment`, but of no larger power of two below 32.
struct Memory {
  std::vector<uint64_t> words;
  int64_t shift = 0;

  Memory() = default;
  Memory(int64_t bytes, int64_t alignment);
  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;

  char* data() { return reinterpret_cast<char*>(words.data()) + shift; }
};

// Boxes, and the memory they refer to.
struct Case {
  Dtype dtype;
  std::vector<CombineBox> boxes;
  int64_t items[kBuffers] = {};
  Memory memory[kBuffers];
  int alignment = 16;

  int64_t bytes(int buffer) const { return items[buffer] * item_bytes(dtype); }
  char* at(const CombineCells& cells) {
    return memory[static_cast<int>(cells.buffer)].data() + cells.offset * item_bytes(dtype);
  }
  BoxView view(const CombineCells& cells, const std::vector<int64_t>& shape) const;
  void make_memory(bool is_large = false);

 private:
  friend Case random_case(Dtype dtype, bool is_large);
  CombineCells random_cells(Buffer buffer, const std::vector<int64_t>& shape, int64_t grain,
                            bool is_large);
};

// Usually few boxes; a single one if it is to be large.
Case random_case(Dtype dtype, bool is_large);

// Bytes of the output, computed by loops over the cells.
std::vector<char> plainly(Case& given, bool failed);

// Whether items are bitwise equal, except that any NaN equals any other.
bool are_equal(const char* found, const char* expected, int64_t bytes, Dtype dtype);

}  // namespace gpudist::combine_cases
