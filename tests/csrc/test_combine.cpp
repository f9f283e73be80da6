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
#include "combine_cases.h"
#include "combine_plan.h"
#include "test.h"

namespace {

using namespace gpudist;
using namespace gpudist::combine_cases;

void launch(CombineArguments arguments, Memory (&memory)[kBuffers], const uint32_t* failed) {
  for (int b = 0; b < kBuffers; ++b) arguments.buffers[b] = memory[b].data();
  arguments.failed = failed;
  for (uint32_t block = 0; block < arguments.blocks; ++block) {
    for (uint32_t thread = 0; thread < CombineArguments::kThreads; ++thread) {
      combine(arguments, arguments.jobs, arguments.views, block, thread);
    }
  }
}

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
    CHECK(are_equal(output, expected.data(), static_cast<int64_t>(expected.size()), given.dtype));
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
