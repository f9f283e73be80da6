// The kernel's body, run for every block and thread, against the packing of the CPU.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "combine_plan.h"
#include "half.h"
#include "test.h"

namespace {

using namespace gpudist;

std::mt19937_64 random_bits(23);

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}

// A buffer whose first byte is a multiple of `alignment`, and of no wider power of two below 32.
struct Memory {
  std::vector<uint64_t> words;
  int64_t shift = 0;

  Memory() = default;
  Memory(int64_t bytes, int64_t alignment) : words(bytes / 8 + 8) {
    for (uint64_t& word : words) word = random_bits();
    const int64_t address = reinterpret_cast<int64_t>(words.data());
    shift = (-address & 31) + alignment;
  }
  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;

  char* data() { return reinterpret_cast<char*>(words.data()) + shift; }
};

template <class T>
void set_random(char* items, int64_t count, const std::function<T()>& item) {
  for (int64_t i = 0; i < count; ++i) {
    const T value = item();
    std::memcpy(items + i * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
  }
}

// Numbers, where random bits may be none.
void set_random_numbers(Memory& memory, int64_t bytes, Dtype dtype) {
  std::uniform_real_distribution<double> range(-1e4, 1e4);
  const auto number = [&] { return range(random_bits); };
  char* const data = memory.data();
  switch (dtype) {
    case Dtype::kFloat16:
      return set_random<uint16_t>(
          data, bytes / 2, [&] { return float_to_float16(static_cast<float>(number()) * 1e-2f); });
    case Dtype::kBfloat16:
      return set_random<uint16_t>(data, bytes / 2,
                                  [&] { return float_to_bfloat16(static_cast<float>(number())); });
    case Dtype::kFloat32:
    case Dtype::kComplex64:
      return set_random<float>(data, bytes / 4, [&] { return static_cast<float>(number()); });
    case Dtype::kFloat64:
    case Dtype::kComplex128: return set_random<double>(data, bytes / 8, number);
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

std::vector<int64_t> random_shape() {
  if (between(0, 30) == 0) return {between(20, 60), between(30, 90)};
  std::vector<int64_t> shape(between(0, 5));
  for (int64_t& extent : shape) extent = between(between(0, 20) ? 1 : 0, shape.size() > 3 ? 4 : 9);
  return shape;
}

// Any order of dims, with gaps; cells that are only read may be shared.
std::vector<int64_t> random_strides(const std::vector<int64_t>& shape, bool shares) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (between(0, 1) == 0) std::shuffle(order.begin(), order.end(), random_bits);
  std::vector<int64_t> strides(shape.size());
  int64_t stride = between(0, 4) == 0 ? 2 : 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    strides[*d] = shares && between(0, 9) == 0 ? 0 : stride;
    stride *= std::max<int64_t>(shape[*d], 1);
    if (between(0, 3) == 0) stride += between(1, 3);
    if (between(0, 3) == 0) stride = (stride + 15) / 16 * 16;
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

// Boxes, and memory for all they touch.
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
  BoxView view(const CombineCells& cells, const std::vector<int64_t>& shape) const {
    const std::vector<int64_t> zero(shape.size());
    return make_box_view(static_cast<int>(shape.size()), zero.data(), shape.data(),
                         cells.strides.data(), item_bytes(dtype));
  }

  CombineCells random_cells(Buffer buffer, const std::vector<int64_t>& shape) {
    int64_t& used = items[static_cast<int>(buffer)];
    const bool is_written = buffer == Buffer::kOutput;
    CombineCells cells{buffer, is_written ? used : 0, random_strides(shape, !is_written)};
    cells.offset += between(0, 1) ? 16 : between(0, 20);
    used = std::max(used, stop_of(cells, shape));
    return cells;
  }

  void make_memory() {
    constexpr int kAlignments[] = {1, 2, 4, 8, 16};
    alignment = kAlignments[between(0, 4)];
    const auto sums = [](const CombineBox& box) { return box.views.size() > 2; };
    if (std::any_of(boxes.begin(), boxes.end(), sums)) {
      alignment = std::max(alignment, static_cast<int>(real_bytes(dtype)));
    }
    for (int b = 0; b < kBuffers; ++b) {
      memory[b] = Memory(bytes(b), alignment);
      if (alignment % real_bytes(dtype) == 0) set_random_numbers(memory[b], bytes(b), dtype);
    }
  }
};

Case random_case(Dtype dtype) {
  Case made;
  made.dtype = dtype;
  constexpr Buffer kSources[] = {Buffer::kInput, Buffer::kSent, Buffer::kReceived};
  for (int64_t i = between(1, 5); i > 0; --i) {
    CombineBox box;
    box.shape = random_shape();
    box.views.push_back(made.random_cells(Buffer::kOutput, box.shape));
    box.already_there = between(0, 7) == 0;
    int64_t summands = box.already_there ? 0 : between(0, 4);
    if (dtype == Dtype::kBool) summands = std::min<int64_t>(summands, 1);
    if (summands > 1 && between(0, 3) == 0) box.views.push_back(box.views[0]), --summands;
    while (summands-- > 0) {
      box.views.push_back(made.random_cells(kSources[between(0, 2)], box.shape));
    }
    made.boxes.push_back(box);
  }
  made.make_memory();
  return made;
}

std::vector<uint64_t> packed(Case& given, const CombineCells& cells, const CombineBox& box) {
  const std::vector<BoxView> views{given.view(cells, box.shape)};
  std::vector<uint64_t> items(views[0].bytes() / 8 + 2);
  BoxStream(&views).gather(given.at(cells), reinterpret_cast<char*>(items.data()),
                           views[0].bytes());
  return items;
}

// One summand added after the other.
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

constexpr double kFill = 3;

// The output's bytes, made by loops over the cells.
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

void launch(CombineArguments arguments, Memory (&memory)[kBuffers], const uint32_t* failed) {
  for (int b = 0; b < kBuffers; ++b) arguments.buffers[b] = memory[b].data();
  arguments.failed = failed;
  for (uint32_t block = 0; block < arguments.blocks; ++block) {
    for (uint32_t thread = 0; thread < CombineArguments::kThreads; ++thread) {
      combine(arguments, arguments.jobs, arguments.views, block, thread);
    }
  }
}

constexpr Dtype kDtypes[] = {Dtype::kBool,    Dtype::kUint8,     Dtype::kInt8,
                             Dtype::kInt16,   Dtype::kInt32,     Dtype::kInt64,
                             Dtype::kFloat16, Dtype::kBfloat16,  Dtype::kFloat32,
                             Dtype::kFloat64, Dtype::kComplex64, Dtype::kComplex128};

void does_what_loops_over_the_cells_do() {
  std::set<int> copies, sums;
  for (int round = 0; round < 2400; ++round) {
    Case given = random_case(kDtypes[round % 12]);
    const bool splits = between(0, 4) == 0;
    const int64_t most_lanes = splits ? between(32, 100) : CombinePlan::kMostLanes;
    const CombinePlan plan(given.dtype, kFill, given.boxes, most_lanes);
    const CombineTable table = plan.table(given.alignment);
    CHECK(plan.is_empty() == table.jobs.empty());
    for (const CombineJob& job : table.jobs) {
      CHECK(job.lanes <= most_lanes);
      (job.summands > 1 ? sums : copies).insert(job.lane_bytes);
    }
    const uint32_t failed = between(0, 5) == 0 ? 1 : 0;
    const std::vector<char> expected = plainly(given, failed != 0);
    launch(plan.arguments(table), given.memory, between(0, 1) || failed ? &failed : nullptr);
    const char* const output = given.memory[static_cast<int>(Buffer::kOutput)].data();
    CHECK(std::equal(expected.begin(), expected.end(), output));
  }
  CHECK((copies == std::set<int>{1, 2, 4, 8, 16}));
  CHECK((sums == std::set<int>{1, 2, 4, 8, 16}));
}

std::vector<int> lanes_of(Dtype dtype, const CombineBox& box, int alignment) {
  std::vector<int> lanes;
  for (const CombineJob& job : CombinePlan(dtype, 0, {box}).table(alignment).jobs) {
    lanes.push_back(job.lane_bytes);
  }
  return lanes;
}

void takes_the_widest_lanes() {
  const CombineCells packed{Buffer::kSent, 0, {12, 1}}, wide{Buffer::kInput, 4, {32, 1}};
  const CombineBox copy{{5, 12}, {packed, wide}};
  CHECK((lanes_of(Dtype::kFloat32, copy, 16) == std::vector{16}));
  CHECK((lanes_of(Dtype::kFloat32, copy, 8) == std::vector{8}));
  CHECK((lanes_of(Dtype::kFloat32, copy, 1) == std::vector{1}));
  CHECK((lanes_of(Dtype::kInt16, copy, 16) == std::vector{8}));
  const CombineBox sum{{5, 12}, {packed, wide, packed}};
  CHECK((lanes_of(Dtype::kFloat32, sum, 16) == std::vector{16}));
  CHECK((lanes_of(Dtype::kInt16, sum, 16) == std::vector{2}));
  CHECK((lanes_of(Dtype::kComplex64, sum, 8) == std::vector{4}));
  const CombineBox odd{{5, 3}, {packed, wide}};
  CHECK((lanes_of(Dtype::kFloat32, odd, 16) == std::vector{4}));
}

void merges_dims_that_continue_in_every_view() {
  // Planes of a channels-last tensor, in the order of another memory format.
  const CombineCells to{Buffer::kOutput, 0, {600, 1, 60, 3}},
      from{Buffer::kInput, 0, {900, 1, 60, 3}};
  const CombineTable table =
      CombinePlan(Dtype::kFloat32, 0, {{{2, 3, 10, 20}, {to, from}}}).table(16);
  CHECK(table.jobs.size() == 1 && table.views.size() == 2);
  CHECK(table.jobs[0].dims == 1 && table.jobs[0].shape[0].value == 2);
  CHECK(table.jobs[0].row_lanes.value == 600 / 4 && table.jobs[0].lanes == 2 * 600 / 4);
  CHECK(table.views[0].stride[0] == 600 * 4 && table.views[1].stride[0] == 900 * 4);
}

void splits_what_32_bits_cannot_count() {
  const int64_t row = int64_t{1} << 31;
  const CombineCells to{Buffer::kOutput, 1, {row + 1, 1}}, from{Buffer::kInput, 0, {row, 1}};
  const CombineTable table = CombinePlan(Dtype::kUint8, 0, {{{3, row}, {to, from}}}).table(1);
  int64_t lanes = 0;
  for (size_t i = 0; i < table.jobs.size(); ++i) {
    const CombineJob& job = table.jobs[i];
    CHECK(job.lanes <= CombinePlan::kMostLanes && job.dims == 1 && job.shape[0].value == 1);
    CHECK(table.views[job.first_view].offset == lanes + 1 + lanes / row);
    CHECK(table.views[job.first_view + 1].offset == lanes);
    CHECK(job.first_block == lanes / CombineArguments::kLanesPerBlock);
    lanes += job.lanes;
  }
  CHECK(lanes == 3 * row);
}

void divides_exactly() {
  constexpr int64_t kMost = CombinePlan::kMostLanes;
  for (int round = 0; round < 20000; ++round) {
    const int64_t value = std::max<int64_t>(between(0, kMost) >> between(0, 30), 1);
    const Divisor by = CombinePlan(Dtype::kUint8, 0, {{{value}, {{Buffer::kOutput, 0, {1}}}}})
                           .table(1)
                           .jobs[0]
                           .row_lanes;
    const int64_t multiple = between(0, kMost / value) * value;
    bool exact = by.value == value;
    for (int64_t n : {int64_t{0}, multiple - 1, multiple, multiple + value - 1, kMost}) {
      if (n >= 0 && n <= kMost) exact &= by.quotient(static_cast<uint32_t>(n)) == n / value;
    }
    CHECK(exact);
  }
}

bool is_refused(Dtype dtype, const CombineBox& box, int alignment) {
  try {
    CombinePlan(dtype, 0, {box}).table(alignment);
  } catch (const TransportError&) {
    return true;
  }
  return false;
}

void refuses_what_it_cannot_do() {
  const CombineCells row{Buffer::kOutput, 0, {1}}, plane{Buffer::kInput, 0, {4, 1}};
  CHECK(is_refused(Dtype::kBool, {{4}, {row, row, row}}, 16));
  CHECK(!is_refused(Dtype::kBool, {{4}, {row, row}}, 16));
  CHECK(is_refused(Dtype::kFloat64, {{4}, {row, row, row}}, 4));
  CHECK(!is_refused(Dtype::kFloat64, {{4}, {row, row}}, 4));
  CHECK(is_refused(Dtype::kInt32, {{4}, {row, plane}}, 16));
  CHECK(is_refused(Dtype::kInt32, {{4}, {}}, 16));
  CHECK(is_refused(Dtype::kInt32, {{4}, {row, row}, true}, 16));
  const std::vector<int64_t> nine(9, 1);
  CHECK(is_refused(Dtype::kInt32, {nine, {{Buffer::kOutput, 0, nine}}}, 16));
}

}  // namespace

void test_combine() {
  does_what_loops_over_the_cells_do();
  takes_the_widest_lanes();
  merges_dims_that_continue_in_every_view();
  splits_what_32_bits_cannot_count();
  divides_exactly();
  refuses_what_it_cannot_do();
}
