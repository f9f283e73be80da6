#include "combine_cases.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>

#include "core/half.h"

namespace gpudist::combine_cases {

std::mt19937_64 random_bits(23);

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

namespace {

template <class T>
void set_random(char* items, int64_t count, const std::function<T()>& item) {
  for (int64_t i = 0; i < count; ++i) {
    const T value = item();
    std::memcpy(items + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
}

// Random bits may be NaN, so draw numbers; some of them are extreme values of the format, or NaN.
void set_random_numbers(Memory& memory, int64_t bytes, Dtype dtype) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  constexpr double kSpecial[] = {
      0.0,     -0.0,    kInfinity, -kInfinity, std::numeric_limits<double>::quiet_NaN(),
      65504.0, 65519.0, 65520.0,   3e-8,       6e-5,
      3.39e38, 1e-40};
  std::uniform_real_distribution<double> range(-1e4, 1e4);
  const auto number = [&](double scale = 1) {
    if (between(0, 31) == 0) return kSpecial[between(0, std::size(kSpecial) - 1)];
    return range(random_bits) * scale;
  };
  char* const data = memory.data();
  switch (dtype) {
    case Dtype::kFloat16:
      return set_random<uint16_t>(
          data, bytes / 2, [&] { return float_to_float16(static_cast<float>(number(1e-2))); });
    case Dtype::kBfloat16:
      return set_random<uint16_t>(data, bytes / 2,
                                  [&] { return float_to_bfloat16(static_cast<float>(number())); });
    case Dtype::kFloat32:
    case Dtype::kComplex64:
      return set_random<float>(data, bytes / 4, [&] { return static_cast<float>(number()); });
    case Dtype::kFloat64:
    case Dtype::kComplex128: return set_random<double>(data, bytes / 8, [&] { return number(); });
    default: return;
  }
}

int64_t real_bytes(Dtype dtype) {
  const bool is_complex = dtype == Dtype::kComplex64 || dtype == Dtype::kComplex128;
  return item_bytes(dtype) / (is_complex ? 2 : 1);
}

int64_t product(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t round_up(int64_t number, int64_t grain) {
  return (number + grain - 1) / grain * grain;
}

// The last extent is a multiple of `grain`; see random_case.
std::vector<int64_t> random_shape(bool small, int64_t grain) {
  constexpr int64_t kMost[] = {1, 1300, 40, 12, 6, 4};
  std::vector<int64_t> shape(between(0, 30) == 0 ? kMaxDims : between(0, 5));
  int64_t most = shape.size() > 5 || small ? 2 : kMost[shape.size()];
  if (between(0, 1) == 0) most = std::min<int64_t>(most, shape.size() > 3 ? 4 : 9);
  const int64_t least = most > 2 && between(0, 1) == 0 ? most / 2 : 1;
  for (int64_t& extent : shape) extent = between(between(0, 20) ? least : 0, most);
  if (!shape.empty()) shape.back() *= grain;
  return shape;
}

// Enough cells to give each lane of a thread one, or to make the bytes of a row, the tiles along
// it, the tiles along a line, or the lines exceed 16 bits.
std::vector<int64_t> large_shape(int64_t grain, int64_t item_bytes) {
  const int64_t many = between(66'000, 70'000);
  switch (between(0, 4)) {
    case 0: return {many * grain};
    case 1: return {between(16, 19), round_up(many / item_bytes, grain)};
    case 2: return {8, round_up(many * 16 / item_bytes, grain)};
    case 3: return {4 * many, grain};
    default: return {2, many, 2, grain};
  }
}

// Several blocks of threads, so that those of two boxes may alternate.
std::vector<int64_t> wide_shape(int64_t item_bytes) {
  return {4 * between(300, 600), 16 / item_bytes};
}

// Strides in any order of dims, with gaps; in all dims if `is_large`. Cells that are only read may
// be shared. If `grain` is above one, rows begin and end at multiples of it.
std::vector<int64_t> random_strides(const std::vector<int64_t>& shape, bool shares, int64_t grain,
                                    bool is_large) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (!is_large && grain == 1 && between(0, 1) == 0)
    std::shuffle(order.begin(), order.end(), random_bits);
  std::vector<int64_t> strides(shape.size());
  int64_t stride = grain == 1 && between(0, 4) == 0 ? 2 : 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    const bool is_shared = shares && between(0, 9) == 0 && (grain == 1 || d != order.rbegin());
    strides[*d] = is_shared ? 0 : stride;
    stride *= std::max<int64_t>(shape[*d], 1);
    if (is_large || between(0, 3) == 0) stride += grain * between(1, 3);
    if (between(0, 3) == 0) stride = round_up(stride, 16);
  }
  return strides;
}

int64_t stop_of(const CombineCells& cells, const std::vector<int64_t>& shape) {
  int64_t last = cells.offset;
  for (size_t d = 0; d < shape.size(); ++d) {
    last += std::max<int64_t>(shape[d] - 1, 0) * cells.strides[d];
  }
  return last + 1;
}

std::vector<uint64_t> packed(Case& given, const CombineCells& cells, const CombineBox& box) {
  const std::vector<BoxView> views{given.view(cells, box.shape)};
  std::vector<uint64_t> items(views[0].bytes() / 8 + 2);
  BoxStream(&views).gather(given.at(cells), reinterpret_cast<char*>(items.data()),
                           views[0].bytes());
  return items;
}

template <class T>
bool are_nan(T a, T b) {
  return std::isnan(a) && std::isnan(b);
}

template <class T>
bool are_equal_numbers(const char* found, const char* expected, int64_t bytes,
                       bool (*are_alike)(T, T)) {
  for (int64_t i = 0; i < bytes; i += static_cast<int64_t>(sizeof(T))) {
    T items[2];
    std::memcpy(&items[0], found + i, sizeof(T));
    std::memcpy(&items[1], expected + i, sizeof(T));
    const bool same = std::memcmp(&items[0], &items[1], sizeof(T)) == 0;
    if (!same && !are_alike(items[0], items[1])) return false;
  }
  return true;
}

// Add one summand after the other.
std::vector<uint64_t> plain_sum(Case& given, const CombineBox& box) {
  std::vector<uint64_t> first = packed(given, box.views[1], box);
  if (box.views.size() == 2) return first;
  const int64_t count = product(box.shape);
  const size_t bytes = count * item_bytes(given.dtype);
  std::vector<uint64_t> sums = first;
  if (is_narrow(given.dtype)) {
    sums.resize(count / 2 + 1);
    widen(reinterpret_cast<char*>(first.data()), reinterpret_cast<float*>(sums.data()), count,
          given.dtype);
  }
  BoxView row;
  row.rows = count > 0 ? 1 : 0;
  row.row_bytes = count * item_bytes(sum_dtype(given.dtype));
  const std::vector<BoxView> rows{row};
  for (size_t v = 2; v < box.views.size(); ++v) {
    const std::vector<uint64_t> items = packed(given, box.views[v], box);
    BoxStream(&rows).scatter_add(reinterpret_cast<char*>(sums.data()),
                                 reinterpret_cast<const char*>(items.data()), bytes, given.dtype);
  }
  if (!is_narrow(given.dtype)) return sums;
  narrow(reinterpret_cast<float*>(sums.data()), reinterpret_cast<char*>(first.data()), count,
         given.dtype);
  return first;
}

}  // namespace

Memory::Memory(int64_t bytes, int64_t alignment) : words(bytes / 8 + 9) {
  for (uint64_t& word : words) word = random_bits();
  const int64_t address = reinterpret_cast<int64_t>(words.data());
  shift = (-address & 31) + alignment * (1 + 2 * between(0, 16 / alignment - 1));
}

BoxView Case::view(const CombineCells& cells, const std::vector<int64_t>& shape) const {
  const std::vector<int64_t> zero(shape.size());
  return make_box_view(static_cast<int>(shape.size()), zero.data(), shape.data(),
                       cells.strides.data(), item_bytes(dtype));
}

CombineCells Case::random_cells(Buffer buffer, const std::vector<int64_t>& shape, int64_t grain,
                                bool is_large) {
  int64_t& used = items[static_cast<int>(buffer)];
  const bool is_written = buffer == Buffer::kOutput;
  CombineCells cells{buffer, is_written ? round_up(used, grain) : 0,
                     random_strides(shape, !is_written, grain, is_large)};
  cells.offset += between(0, 1) ? 16 : grain * between(0, 20);
  used = std::max(used, stop_of(cells, shape));
  return cells;
}

void Case::make_memory(bool is_large) {
  constexpr int kAlignments[] = {1, 2, 4, 8, 16};
  // Large cases are few, and each alignment has code of its own.
  alignment = !is_large && between(0, 1) == 0 ? 16 : kAlignments[between(0, 4)];
  const auto sums = [](const CombineBox& box) { return box.views.size() > 2; };
  if (std::any_of(boxes.begin(), boxes.end(), sums)) {
    alignment = std::max(alignment, static_cast<int>(real_bytes(dtype)));
  }
  for (int b = 0; b < kBuffers; ++b) {
    memory[b] = Memory(bytes(b), alignment);
    if (alignment % real_bytes(dtype) == 0) set_random_numbers(memory[b], bytes(b), dtype);
  }
}

Case random_case(Dtype dtype, bool is_large) {
  Case made;
  made.dtype = dtype;
  constexpr Buffer kSources[] = {Buffer::kInput, Buffer::kSent, Buffer::kReceived};
  const bool alternates = !is_large && between(0, 11) == 0;
  const int64_t count = is_large         ? 1
                        : alternates     ? between(3, 4)
                        : between(0, 23) ? between(1, 5)
                                         : between(6, 80);
  // Items of copies and fills may lie across granules.
  const int64_t most_summands = !alternates && between(0, 8) == 0 ? 1 : 4;
  for (int64_t i = 0; i < count; ++i) {
    CombineBox box;
    // In items; at most the widest lane, which has 16 bytes.
    int64_t grain = between(0, 1) == 0 ? 1 : std::max<int64_t>(16 / item_bytes(dtype), 1);
    if (between(0, 3) == 0) grain = std::max<int64_t>(grain >> between(1, 3), 1);
    box.shape = is_large              ? large_shape(grain, item_bytes(dtype))
                : alternates && i < 2 ? wide_shape(item_bytes(dtype))
                                      : random_shape(count > 5, grain);
    box.views.push_back(made.random_cells(Buffer::kOutput, box.shape, grain, is_large));
    box.already_there = !alternates && between(0, 7) == 0;
    int64_t summands = box.already_there ? 0 : between(0, most_summands);
    if (dtype == Dtype::kBool) summands = std::min<int64_t>(summands, 1);
    if (summands > 1 && between(0, 3) == 0) box.views.push_back(box.views[0]), --summands;
    while (summands-- > 0) {
      const Buffer source = kSources[between(0, 2)];
      box.views.push_back(made.random_cells(source, box.shape, grain, is_large));
    }
    made.boxes.push_back(box);
  }
  made.make_memory(is_large);
  return made;
}

std::vector<char> plainly(Case& given, bool failed) {
  constexpr int kOutput = static_cast<int>(Buffer::kOutput);
  char* const output = given.memory[kOutput].data();
  std::vector<char> expected(output, output + given.bytes(kOutput));
  for (const CombineBox& box : given.boxes) {
    const BoxView view = given.view(box.views[0], box.shape);
    const std::vector<BoxView> views{view};
    const int64_t offset = box.views[0].offset * item_bytes(given.dtype);
    if (failed) {
      const std::vector<char> ones(view.bytes(), '\xff');
      BoxStream(&views).scatter(expected.data() + offset, ones.data(), ones.size());
    } else if (!box.already_there && box.views.size() == 1) {
      Memory filled(given.bytes(kOutput), 16);
      fill(filled.data(), view, given.dtype, kFill);
      std::vector<char> cells(view.bytes());
      BoxStream(&views).gather(filled.data(), cells.data(), cells.size());
      BoxStream(&views).scatter(expected.data() + offset, cells.data(), cells.size());
    } else if (!box.already_there) {
      const std::vector<uint64_t> sum = plain_sum(given, box);
      BoxStream(&views).scatter(expected.data() + offset, reinterpret_cast<const char*>(sum.data()),
                                view.bytes());
    }
  }
  return expected;
}

bool are_equal(const char* found, const char* expected, int64_t bytes, Dtype dtype) {
  if (std::memcmp(found, expected, bytes) == 0) return true;
  switch (dtype) {
    case Dtype::kFloat16:
      return are_equal_numbers<uint16_t>(found, expected, bytes, [](uint16_t a, uint16_t b) {
        constexpr uint16_t kNoNumber = 0x7e00;
        return (a & 0x7fff) == kNoNumber && (b & 0x7fff) == kNoNumber;
      });
    case Dtype::kFloat32:
    case Dtype::kComplex64: return are_equal_numbers<float>(found, expected, bytes, are_nan<float>);
    case Dtype::kFloat64:
    case Dtype::kComplex128:
      return are_equal_numbers<double>(found, expected, bytes, are_nan<double>);
    default: return false;
  }
}

}  // namespace gpudist::combine_cases
