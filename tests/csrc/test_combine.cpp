// The combine kernel's body, run for every block and thread, compared with the CPU's packing.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "combine_cases.h"
#include "core/combine_plan.h"
#include "core/errors.h"
#include "test.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes)
#endif

namespace {

using namespace gpudist;
using namespace gpudist::combine_cases;

// A copy of a buffer in an allocation of exactly its size, so that sanitizers see overruns.
class Exact {
 public:
  Exact(char* data, int64_t bytes)
      : shift_(reinterpret_cast<uintptr_t>(data) % 16),
        allocation_(static_cast<char*>(std::malloc(shift_ + bytes)), &std::free) {
    std::memcpy(this->data(), data, bytes);
    ASAN_POISON_MEMORY_REGION(allocation_.get(), shift_);
  }

  char* data() { return allocation_.get() + shift_; }

 private:
  int64_t shift_;
  std::unique_ptr<char, decltype(&std::free)> allocation_;
};

// Return the output after the launch.
std::vector<char> launched(Case& given, CombineArguments arguments, const uint32_t* failed) {
  std::vector<Exact> buffers;
  for (int b = 0; b < kBuffers; ++b) {
    buffers.emplace_back(given.memory[b].data(), given.bytes(b));
    arguments.buffers[b] = buffers[b].data();
  }
  arguments.failed = failed;
  for (uint32_t block = 0; block < arguments.blocks; ++block) {
    for (uint32_t thread = 0; thread < CombineArguments::kThreads; ++thread) {
      combine(arguments, arguments.jobs, arguments.views, block, thread);
    }
  }
  constexpr int kOutput = static_cast<int>(Buffer::kOutput);
  return {buffers[kOutput].data(), buffers[kOutput].data() + given.bytes(kOutput)};
}

int64_t bytes_of(const CombineJob& job) {
  int64_t bytes = job.line_bytes;
  for (int d = 0; d < job.dims; ++d) bytes *= job.shape[d].value;
  return bytes;
}

// Launch, and compare the whole memory of the output.
void check_launch(Case& given, const CombineTable& table, const CombinePlan& plan, bool fails) {
  const uint32_t failed = fails ? 1 : 0;
  const std::vector<char> expected = plainly(given, fails);
  const std::vector<char> output =
      launched(given, plan.arguments(table), between(0, 1) || fails ? &failed : nullptr);
  CHECK(
      are_equal(output.data(), expected.data(), static_cast<int64_t>(output.size()), given.dtype));
}

void does_what_loops_over_the_cells_do(int rounds) {
  for (int round = 0; round < rounds; ++round) {
    Case given = random_case(kDtypes[round % 12], between(0, 119) == 0);
    const bool splits = between(0, 4) == 0;
    const int64_t most_bytes = splits ? between(32, 1000) : CombinePlan::kMostBytes;
    const CombinePlan plan(given.dtype, kFill, given.boxes, most_bytes);
    const CombineTable table =
        plan.table(given.alignment, between(0, 1) ? between(1, 4) : CombinePlan::kGroupBlocks);
    CHECK(plan.is_empty() == table.jobs.empty());
    for (const CombineJob& job : table.jobs) CHECK(bytes_of(job) <= most_bytes);
    check_launch(given, table, plan, between(0, 5) == 0);
  }
}

// Rows of 1 to 70 items; source and destination begin at any offsets in a granule.
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
        given.items[static_cast<int>(Buffer::kOutput)] = to + (rows - 1) * pitch + items;
        given.items[static_cast<int>(Buffer::kInput)] = from + (rows - 1) * other_pitch + items;
        given.boxes.push_back(box);
        given.make_memory();
        const CombinePlan plan(dtype, kFill, given.boxes);
        check_launch(given, plan.table(given.alignment), plan, between(0, 9) == 0);
      }
    }
  }
}

// Cells that have their values are written only if received data is invalid.
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

// Each of a thread's four rows is a whole row, or a part of one.
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

// Blocks of large jobs alternate in groups; each block is in one place, and small jobs are last.
void alternates_blocks_of_large_jobs() {
  Case given;
  given.dtype = Dtype::kInt8;
  const std::vector<int64_t> strides{6000, 1};
  int64_t items = 0;
  for (const int64_t planes : {3, 50, 1, 33}) {
    given.boxes.push_back(
        {{planes, 5000}, {{Buffer::kOutput, items, strides}, {Buffer::kInput, 1, strides}}});
    items += planes * 6000;
  }
  given.items[static_cast<int>(Buffer::kOutput)] = items;
  given.items[static_cast<int>(Buffer::kInput)] = 50 * 6000;
  given.make_memory();
  const CombinePlan plan(given.dtype, kFill, given.boxes);
  const CombineTable table = plan.table(given.alignment, 5);
  const CombineArguments arguments = plan.arguments(table);
  CHECK(table.grouped_jobs == 2 && table.jobs[0].blocks == 16 && table.jobs[1].blocks == 12);
  CHECK(table.jobs[0].group_blocks == 6 && table.jobs[1].group_blocks == 4);
  CHECK(table.group.value == 10 && table.grouped_blocks == 30);
  std::vector<std::vector<int>> seen;
  for (const CombineJob& job : table.jobs) seen.emplace_back(job.blocks);
  uint32_t idle = 0;
  for (uint32_t block = 0; block < table.blocks; ++block) {
    const combining::Place place(arguments, table.jobs.data(), block);
    if (place.block < seen[place.job].size()) {
      ++seen[place.job][place.block];
    } else {
      ++idle;
    }
  }
  for (const std::vector<int>& times : seen) {
    CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
  }
  CHECK(idle < table.grouped_jobs * 3);
  CHECK(plan.table(given.alignment).grouped_blocks == 0);
  for (bool fails : {false, true}) check_launch(given, table, plan, fails);
}

void merges_dims_that_continue_in_every_view() {
  // Planes of a channels-last tensor, copied to another memory format.
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
  constexpr uint32_t kNoGroups = uint32_t{1} << 31;
  const CombineTable table =
      CombinePlan(Dtype::kUint8, 0, {{{3, row}, {to, from}}}).table(1, kNoGroups);
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

void test_combine(int rounds) {
  does_what_loops_over_the_cells_do(rounds);
  moves_rows_of_every_alignment();
  cells_that_are_there_take_one_block();
  finds_rows_for_all_threads();
  alternates_blocks_of_large_jobs();
  merges_dims_that_continue_in_every_view();
  splits_what_32_bits_cannot_count();
  divides_exactly();
  refuses_what_it_cannot_do();
}
