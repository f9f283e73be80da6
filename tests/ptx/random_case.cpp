#include "random_case.h"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/norm_cells.h"
#include "runtime.h"

namespace gpudist::ptx {

namespace {

std::vector<Range> live;
std::string fault_text;

void check(int error, const char* what) {
  if (error != 0) throw std::runtime_error(std::string(what) + " was refused");
}

bool is_nan(const char* items, int64_t item, Dtype dtype) {
  return std::isnan(dtype == Dtype::kFloat64 ? reinterpret_cast<const double*>(items)[item]
                                             : norming::value_at(items, item, dtype));
}

}  // namespace

std::mt19937_64 random_bits;

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

bool one_of(int64_t count) {
  return between(1, count) == 1;
}

void begin_launch(uint64_t seed, uint64_t index) {
  random_bits.seed(seed * 0x9e3779b97f4a7c15u + index);
  manner().next = seed * 1'000'003 + index;
  live.clear();
  static const int loaded = cuda_api()->check_kernels();
  check(loaded, "loading the kernels");
}

void add_live(const void* begin, int64_t bytes, const char* kind) {
  const auto at = reinterpret_cast<uint64_t>(begin);
  if (bytes > 0) live.push_back({at, at + static_cast<uint64_t>(bytes), kind});
}

char* reserve(int64_t bytes) {
  void* const made = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw std::runtime_error("no addresses for cells that lie far apart");
  return static_cast<char*>(made);
}

bool are_equal(const char* found, const char* expected, int64_t bytes, Dtype dtype) {
  if (std::memcmp(found, expected, static_cast<size_t>(bytes)) == 0) return true;
  const int64_t size = item_bytes(dtype);
  for (int64_t i = 0; i < bytes / size; ++i) {
    const bool same = std::memcmp(found + i * size, expected + i * size, size) == 0;
    if (!same && !(is_nan(found, i, dtype) && is_nan(expected, i, dtype))) return false;
  }
  return true;
}

std::string fault_of(int refusal) {
  check(refusal, "a launch");
  return std::exchange(fault_text, "");
}

Range find_other_memory(uint64_t address) {
  Range nearest;
  for (const Range& range : live) {
    if (address >= range.begin && address < range.end) return range;
    if (address >= range.end && range.end > nearest.end) nearest = range;
  }
  return nearest;
}

void report(const std::string& fault) {
  fault_text = fault;
}

}  // namespace gpudist::ptx
