// The kernel's body, run for every block and thread, against the packing of the CPU.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#endif

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

// An allocation that ends with its last byte, for the sanitizers; the first lies `shift` bytes
// after a multiple of 16.
struct Memory {
  std::unique_ptr<char, decltype(&std::free)> allocation{nullptr, &std::free};
  int64_t shift = 0;

  Memory() = default;
  Memory(int64_t bytes, int64_t shift)
      : allocation(static_cast<char*>(std::malloc(shift + bytes)), &std::free), shift(shift) {
    for (int64_t i = 0; i < bytes; ++i) data()[i] = static_cast<char>(random_bits());
    ASAN_POISON_MEMORY_REGION(allocation.get(), shift);
  }

  char* data() { return allocation.get() + shift; }
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
      memory[b] = Memory(bytes(b), alignment % 16);
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
      Memory filled(given.bytes(kOutput), 0);
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

int64_t bytes_of(const CombineJob& job) {
  int64_t bytes = job.line_bytes;
  for (int d = 0; d < job.dims; ++d) bytes *= job.shape[d].value;
  return bytes;
}

// Launch, and compare all memory of the output.
void check_launch(Case& given, const CombineTable& table, const CombinePlan& plan, bool fails) {
  const uint32_t failed = fails ? 1 : 0;
  const std::vector<char> expected = plainly(given, fails);
  launch(plan.arguments(table), given.memory, between(0, 1) || fails ? &failed : nullptr);
  const char* const output = given.memory[static_cast<int>(Buffer::kOutput)].data();
  CHECK(std::equal(expected.begin(), expected.end(), output));
}

void does_what_loops_over_the_cells_do() {
  for (int round = 0; round < 2400; ++round) {
    Case given = random_case(kDtypes[round % 12]);
    const bool splits = between(0, 4) == 0;
    const int64_t most_bytes = splits ? between(32, 1000) : CombinePlan::kMostBytes;
    const CombinePlan plan(given.dtype, kFill, given.boxes, most_bytes);
    const CombineTable table = plan.table(given.alignment);
    CHECK(plan.is_empty() == table.jobs.empty());
    for (const CombineJob& job : table.jobs) CHECK(bytes_of(job) <= most_bytes);
    check_launch(given, table, plan, between(0, 5) == 0);
  }
}

// Rows of 1 to 70 items that begin anywhere in a granule, their neighbours anywhere else.
void moves_rows_of_every_alignment() {
  for (Dtype dtype : {Dtype::kUint8, Dtype::kInt16, Dtype::kBfloat16, Dtype::kFloat16,
                      Dtype::kInt32, Dtype::kFloat32, Dtype::kFloat64}) {
    const int64_t steps = 16 / item_bytes(dtype);
    for (int64_t to = 0; to < steps; ++to) {
      for (int64_t from = 0; from < steps; ++from) {
        Case given;
        given.dtype = dtype;
        const int64_t items = between(1, 70), rows = between(1, 6);
        const int64_t pitch = items + between(0, 2 * steps), other_pitch = items + between(0, 3);
        CombineBox box{{rows, items}, {{Buffer::kOutput, to, {pitch, 1}}}};
        for (int64_t summand = between(1, 3); summand > 0; --summand) {
          box.views.push_back({Buffer::kInput, from, {other_pitch, 1}});
        }
        if (between(0, 3) == 0) box.views[1] = box.views[0];
        given.items[static_cast<int>(Buffer::kOutput)] = stop_of(box.views[0], box.shape);
        given.items[static_cast<int>(Buffer::kInput)] = stop_of(box.views.back(), box.shape);
        given.boxes.push_back(box);
        given.make_memory();
        const CombinePlan plan(dtype, kFill, given.boxes);
        check_launch(given, plan.table(given.alignment), plan, between(0, 9) == 0);
      }
    }
  }
}

// They are written only when what has been received is worthless.
void cells_that_are_there_take_one_block() {
  const int64_t items = 1 << 20;
  Case given;
  given.dtype = Dtype::kInt8;
  given.boxes.push_back({{items}, {{Buffer::kOutput, 1, {1}}}, true});
  given.items[static_cast<int>(Buffer::kOutput)] = items + 2;
  given.make_memory();
  const CombinePlan plan(given.dtype, kFill, given.boxes);
  const CombineTable table = plan.table(given.alignment);
  CHECK(table.jobs.size() == 1 && table.blocks == 1);
  for (bool fails : {false, true}) check_launch(given, table, plan, fails);
}

// A row for each thread's four rows, or parts of one.
void finds_rows_for_all_threads() {
  const auto job_of = [](std::vector<int64_t> shape, int64_t pitch) {
    std::vector<int64_t> strides{1};
    if (shape.size() == 2) strides = {pitch, 1};
    const CombineBox box{shape, {{Buffer::kOutput, 0, strides}, {Buffer::kInput, 1, strides}}};
    return CombinePlan(Dtype::kFloat32, 0, {box}).table(16).jobs[0];
  };
  const CombineJob narrow = job_of({100, 64}, 68), odd = job_of({100, 64}, 67);
  CHECK(narrow.row_bytes == 256 && narrow.columns.value == 16 && narrow.line.value == 25);
  CHECK(odd.columns.value == 17 && odd.tiles == 17 * 25);
  const CombineJob long_row = job_of({5000}, 0);
  CHECK(long_row.dims == 0 && long_row.line_bytes == 20000 && long_row.row_bytes == 2512);
  CHECK(long_row.line.value == 2 && long_row.columns.value == 157);
  const CombineJob two_rows = job_of({2, 4096}, 5000);
  CHECK(two_rows.dims == 1 && two_rows.shape[0].value == 2 && two_rows.row_bytes == 4096);
  const CombineJob cells = job_of({1000, 1}, 9);
  CHECK(cells.row_bytes == 4 && cells.tile_bytes == 4 && cells.step_bytes == 250 * 4);
}

void merges_dims_that_continue_in_every_view() {
  // Planes of a channels-last tensor, in the order of another memory format.
  const CombineCells to{Buffer::kOutput, 0, {600, 1, 60, 3}},
      from{Buffer::kInput, 0, {900, 1, 60, 3}};
  const CombineTable table = CombinePlan(Dtype::kInt8, 0, {{{2, 3, 10, 20}, {to, from}}}).table(16);
  CHECK(table.jobs.size() == 1 && table.views.size() == 2);
  CHECK(table.jobs[0].dims == 0 && table.jobs[0].line_bytes == 2 * 600);
  CHECK(table.jobs[0].row_bytes == 600 && table.jobs[0].line.value == 1);
  CHECK(table.views[0].step == 600 && table.views[1].step == 900);
  CHECK(table.views[0].stop == 1200 && table.views[1].stop == 1500);
}

void splits_what_32_bits_cannot_count() {
  const int64_t row = int64_t{1} << 31;
  const CombineCells to{Buffer::kOutput, 1, {row + 1, 1}}, from{Buffer::kInput, 0, {row, 1}};
  const CombineTable table = CombinePlan(Dtype::kUint8, 0, {{{3, row}, {to, from}}}).table(1);
  int64_t bytes = 0;
  uint32_t blocks = 0;
  for (const CombineJob& job : table.jobs) {
    CHECK(bytes_of(job) <= CombinePlan::kMostBytes && job.dims == 0);
    CHECK(job.tiles == job.columns.value * job.line.value);
    CHECK(table.views[job.first_view].offset == bytes + 1 + bytes / row);
    CHECK(table.views[job.first_view + 1].offset == bytes);
    CHECK(job.first_block == blocks);
    blocks += job.blocks;
    bytes += bytes_of(job);
  }
  CHECK(bytes == 3 * row && table.blocks == blocks);
}

void divides_exactly() {
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  for (int round = 0; round < 20000; ++round) {
    const int64_t value = between(0, kMost >> 3) >> between(0, 27);
    const CombineBox box{{value, 2}, {{Buffer::kOutput, 0, {5, 2}}}};
    if (value == 0) continue;
    const CombineJob job = CombinePlan(Dtype::kUint8, 0, {box}).table(1).jobs[0];
    const Divisor by = value == 1 ? job.columns : job.shape[0];
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
  CHECK(is_refused(Dtype::kInt32, {{4}, {{Buffer::kOutput, 3, {-1}}}}, 16));
  CHECK(is_refused(Dtype::kInt32, {{4}, {row, row}, true}, 16));
  const std::vector<int64_t> nine(9, 1);
  CHECK(is_refused(Dtype::kInt32, {nine, {{Buffer::kOutput, 0, nine}}}, 16));
}

}  // namespace

void test_combine() {
  does_what_loops_over_the_cells_do();
  moves_rows_of_every_alignment();
  cells_that_are_there_take_one_block();
  finds_rows_for_all_threads();
  merges_dims_that_continue_in_every_view();
  splits_what_32_bits_cannot_count();
  divides_exactly();
  refuses_what_it_cannot_do();
}
