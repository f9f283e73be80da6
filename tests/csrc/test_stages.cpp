// Bound stages: what ranks send is added in the order of the receives, bitwise.
#include <random>

#include "half.h"
#include "plan.h"
#include "test.h"
#include "world.h"

namespace {

using namespace gpudist;

constexpr int kRanks = 5;

// Rank r sends its cells to all others and adds everybody's into rows [r % 2, r % 2 + 2) of its own
// 3: rows that overlap with those of others.
BoundStage overlapping_sum(Dtype dtype, int rank, int64_t cells) {
  const std::vector<int64_t> all{0, 0, 2, cells};
  const auto place = [&](int from) {
    return std::vector<int64_t>{from % 2, 0, from % 2 + 2, cells};
  };
  BoundStage::Messages sends, receives;
  for (int peer = 0; peer < kRanks; ++peer) {
    if (peer == rank) continue;
    sends.push_back({peer, {all}});
    receives.push_back({peer, {place(peer)}});
  }
  return BoundStage(dtype, {cells, 1}, {cells, 1}, 3 * cells, 0, true, true, {all}, {place(rank)},
                    sends, receives, rank);
}

std::vector<float> values_of(int rank, int64_t cells) {
  std::mt19937 random(rank);
  std::normal_distribution<float> normal;
  const float scale[kRanks] = {1e8f, 1, -1e8f, 1, 3};
  std::vector<float> values(2 * cells);
  for (float& value : values) value = scale[rank] + normal(random);
  return values;
}

void sums_are_in_the_order_of_the_receives() {
  for (int64_t cells : {1, 100, 40'000}) {
    std::vector<float> expected(3 * cells);
    for (int from = 0; from < kRanks; ++from) {
      const std::vector<float> values = values_of(from, cells);
      for (int64_t i = 0; i < 2 * cells; ++i) expected[(from % 2) * cells + i] += values[i];
    }
    World world(kRanks);
    const auto errors = world.run([&](HostCommunicator& me, int rank) {
      const BoundStage stage = overlapping_sum(Dtype::kFloat32, rank, cells);
      const std::vector<float> values = values_of(rank, cells);
      for (int round = 0; round < 3; ++round) {
        std::vector<float> output(3 * cells, 7);
        run_stages(me, signature_of("sum"),
                   {{&stage, reinterpret_cast<const char*>(values.data()),
                     reinterpret_cast<char*>(output.data())}});
        CHECK(std::memcmp(output.data(), expected.data(), 4 * output.size()) == 0);
      }
    });
    CHECK(all_fine(errors));
  }
}

void narrow_sums_are_rounded_once() {
  const int64_t cells = 50'000;
  std::vector<uint16_t> expected(3 * cells);
  std::vector<float> sums(3 * cells);
  const auto narrowed = [&](int rank) {
    std::vector<uint16_t> values;
    for (float value : values_of(rank, cells)) values.push_back(float_to_bfloat16(value));
    return values;
  };
  for (int from = 0; from < kRanks; ++from) {
    const std::vector<uint16_t> values = narrowed(from);
    for (int64_t i = 0; i < 2 * cells; ++i) {
      sums[(from % 2) * cells + i] += bfloat16_to_float(values[i]);
    }
  }
  for (int64_t i = 0; i < 3 * cells; ++i) expected[i] = float_to_bfloat16(sums[i]);
  World world(kRanks);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    const BoundStage stage = overlapping_sum(Dtype::kBfloat16, rank, cells);
    const std::vector<uint16_t> values = narrowed(rank);
    std::vector<uint16_t> output(3 * cells);
    run_stages(me, signature_of("sum"),
               {{&stage, reinterpret_cast<const char*>(values.data()),
                 reinterpret_cast<char*>(output.data())}});
    CHECK(output == expected);
  });
  CHECK(all_fine(errors));
}

// Two calls in flight together: a shift to the right and one to the left, the edges filled.
void stages_run_together() {
  const int64_t cells = 30'000;
  World world(4);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    const auto shift = [&](int to, int from, double fill) {
      BoundStage::Messages sends, receives;
      if (to >= 0 && to < 4) sends.push_back({to, {{0, cells}}});
      if (from >= 0 && from < 4) receives.push_back({from, {{1, cells + 1}}});
      return BoundStage(Dtype::kInt32, {1}, {1}, cells + 1, fill, true, false, {{0, 1}}, {{0, 1}},
                        sends, receives, 0);
    };
    const BoundStage right = shift(rank + 1, rank - 1, -5), left = shift(rank - 1, rank + 1, 9);
    const std::vector<int32_t> input(cells, rank);
    std::vector<int32_t> to_right(cells + 1), to_left(cells + 1);
    const char* in = reinterpret_cast<const char*>(input.data());
    run_stages(me, signature_of("shift both ways"),
               {{&right, in, reinterpret_cast<char*>(to_right.data())},
                {&left, in, reinterpret_cast<char*>(to_left.data())}});
    const auto expected = [&](int32_t value) {
      std::vector<int32_t> cells_of(cells + 1, value);
      cells_of[0] = rank;
      return cells_of;
    };
    CHECK(to_right == expected(rank > 0 ? rank - 1 : -5));
    CHECK(to_left == expected(rank < 3 ? rank + 1 : 9));
  });
  CHECK(all_fine(errors));
}

void a_stage_may_be_local() {
  const std::vector<double> input{1, 2, 3, 4, 5, 6};
  std::vector<double> output(4);
  const BoundStage turned(Dtype::kFloat64, {1, 3}, {2, 1}, 4, 0.5, true, false, {{0, 0, 2, 1}},
                          {{0, 1, 2, 2}}, {}, {}, 0);
  run_local_stage({&turned, reinterpret_cast<const char*>(input.data()),
                   reinterpret_cast<char*>(output.data())});
  CHECK((output == std::vector<double>{0.5, 1, 0.5, 2}));
  const BoundStage empty(Dtype::kFloat64, {1}, {1}, 0, 0.5, true, false, {}, {}, {}, {}, 0);
  run_local_stage({&empty, nullptr, nullptr});
}

}  // namespace

void test_stages() {
  sums_are_in_the_order_of_the_receives();
  narrow_sums_are_rounded_once();
  stages_run_together();
  a_stage_may_be_local();
}
