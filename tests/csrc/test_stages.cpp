// Bound stages: sums are in the order of the receives, bitwise.

#include "core/half.h"
#include "host/plan.h"
#include "test.h"
#include "world.h"

namespace {

using namespace gpudist;

constexpr int kRanks = 5;

// Every rank sends its cells to all others, and adds the cells of rank r to rows [r % 2, r % 2 + 2)
// of its 3 rows, so that contributions overlap.
BoundStage overlapping_sum(Dtype dtype, int rank, int64_t cells) {
  const std::vector<int64_t> all{0, 0, 2, cells};
  const auto place = [&](int from) {
    return std::vector<int64_t>{from % 2, 0, from % 2 + 2, cells};
  };
  StageBoxes boxes;
  for (int peer = 0; peer < kRanks; ++peer) {
    boxes.sums.push_back({peer == rank ? -1 : peer, {place(peer)}});
    if (peer != rank) boxes.sends.push_back({peer, {all}});
  }
  boxes.own_sources = {all};
  boxes.fills = {{0, 0, 3, cells}};
  return BoundStage(dtype, {cells, 1}, {cells, 1}, 3 * cells, 0, false, false, false, boxes);
}

std::vector<float> values_of(int rank, int64_t cells) {
  uint32_t random = rank + 1;
  const float scale[kRanks] = {1e8f, 1, -1e8f, 1, 3};
  std::vector<float> values(2 * cells);
  for (float& value : values) {
    random = random * 1664525u + 1013904223u;
    value = scale[rank] + 0x1p-30f * static_cast<int32_t>(random);
  }
  return values;
}

void sums_are_in_the_order_of_the_receives(bool takes_turns) {
  for (int64_t cells : {1, 100, 40'000}) {
    std::vector<float> expected(3 * cells);
    for (int from = 0; from < kRanks; ++from) {
      const std::vector<float> values = values_of(from, cells);
      for (int64_t i = 0; i < 2 * cells; ++i) expected[(from % 2) * cells + i] += values[i];
    }
    World world(kRanks, 60, takes_turns);
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

// Two calls in flight together, a shift to the right and one to the left, with filled edges.
void stages_run_together() {
  const int64_t cells = 30'000;
  World world(4);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    const auto shift = [&](int to, int from, double fill) {
      StageBoxes boxes;
      boxes.fills = {{1, cells + 1}};
      boxes.move_sources = boxes.move_destinations = {{0, 1}};
      if (to >= 0 && to < 4) boxes.sends.push_back({to, {{0, cells}}});
      if (from >= 0 && from < 4) boxes.receives.push_back({from, {{1, cells + 1}}});
      return BoundStage(Dtype::kInt32, {1}, {1}, cells + 1, fill, false, false, false, boxes);
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
  StageBoxes boxes;
  boxes.fills = {{0, 0, 2, 1}};
  boxes.move_sources = {{0, 0, 2, 1}};
  boxes.move_destinations = {{0, 1, 2, 2}};
  const BoundStage turned(Dtype::kFloat64, {1, 3}, {2, 1}, 4, 0.5, false, false, false, boxes);
  run_local_stage({&turned, reinterpret_cast<const char*>(input.data()),
                   reinterpret_cast<char*>(output.data())});
  CHECK((output == std::vector<double>{0.5, 1, 0.5, 2}));
  const BoundStage empty(Dtype::kFloat64, {1}, {1}, 0, 0.5, false, false, false, {});
  run_local_stage({&empty, nullptr, nullptr});
}

// Every rank adds the blocks of all ranks; the first contribution overwrites.
BoundStage whole_sum(int rank, int64_t cells, bool accumulates) {
  const std::vector<int64_t> all{0, cells};
  StageBoxes boxes;
  for (int peer = 0; peer < kRanks; ++peer) {
    boxes.sums.push_back({peer == rank ? -1 : peer, {all}});
    if (peer != rank) boxes.sends.push_back({peer, {all}});
  }
  boxes.own_sources = {all};
  return BoundStage(Dtype::kFloat32, {1}, {1}, cells, 0, !accumulates, true, accumulates, boxes);
}

// Sums of the same cells advance piece by piece, also for large messages.
void sums_of_the_same_cells_stream(bool takes_turns) {
  for (int64_t cells : {1, 5000, 300'000}) {
    World world(kRanks, 60, takes_turns);
    for (bool accumulates : {false, true}) {
      std::vector<float> expected(cells, accumulates ? 7 : 0);
      for (int from = 0; from < kRanks; ++from) {
        const std::vector<float> values = values_of(from, cells);
        for (int64_t i = 0; i < cells; ++i) expected[i] += values[i];
      }
      const auto errors = world.run([&](HostCommunicator& me, int rank) {
        const BoundStage stage = whole_sum(rank, cells, accumulates);
        const std::vector<float> values = values_of(rank, cells);
        for (int round = 0; round < 3; ++round) {
          std::vector<float> output(cells, 7);
          run_stages(me, signature_of("whole sum"),
                     {{&stage, reinterpret_cast<const char*>(values.data()),
                       reinterpret_cast<char*>(output.data())}});
          CHECK(std::memcmp(output.data(), expected.data(), 4 * output.size()) == 0);
        }
      });
      CHECK(all_fine(errors));
    }
  }
}

// Rank r sums part r of all blocks and sends the sum to all others.
void sums_are_sent_on(int64_t part) {
  const int64_t cells = kRanks * part;
  std::vector<float> expected(cells);
  for (int from = 0; from < kRanks; ++from) {
    const std::vector<float> values = values_of(from, cells);
    for (int64_t i = 0; i < cells; ++i)
      expected[i] = from > 0 ? expected[i] + values[i] : values[i];
  }
  World world(kRanks);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    const auto box = [&](int of) { return std::vector<int64_t>{of * part, (of + 1) * part}; };
    StageBoxes boxes;
    for (int peer = 0; peer < kRanks; ++peer) {
      boxes.sums.push_back({peer == rank ? -1 : peer, {box(rank)}});
      if (peer == rank) continue;
      boxes.sends.push_back({peer, {box(peer)}});
      boxes.relays.push_back({peer, {box(rank)}});
      boxes.relayed.push_back({peer, {box(peer)}});
    }
    boxes.own_sources = {box(rank)};
    const BoundStage stage(Dtype::kFloat32, {1}, {1}, cells, 0, true, true, false, boxes);
    const std::vector<float> values = values_of(rank, cells);
    std::vector<float> output(cells, 7);
    run_stages(me, signature_of("relayed sum"),
               {{&stage, reinterpret_cast<const char*>(values.data()),
                 reinterpret_cast<char*>(output.data())}});
    CHECK(std::memcmp(output.data(), expected.data(), 4 * output.size()) == 0);
  });
  CHECK(all_fine(errors));
}

// Both ranks keep all their cells and get the other's first cells, whose rows leave gaps.
void large_moves_let_messages_pass(int64_t columns, bool takes_turns) {
  constexpr int64_t kRows = 70;
  World world(2, 60, takes_turns);
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    const int64_t width = columns + 1;
    StageBoxes boxes;
    boxes.sends = {{1 - rank, {{0, 0, kRows, columns}}}};
    boxes.move_sources = boxes.move_destinations = {{0, 0, kRows, columns}};
    boxes.receives = {{1 - rank, {{kRows, 0, 2 * kRows, columns}}}};
    const BoundStage stage(Dtype::kFloat32, {columns, 1}, {width, 1}, 2 * kRows * width, 0, false,
                           false, false, boxes);
    const std::vector<float> mine = values_of(rank, kRows * columns);
    const std::vector<float> theirs = values_of(1 - rank, kRows * columns);
    std::vector<float> output(2 * kRows * width, 7);
    run_stages(me, signature_of("moves"),
               {{&stage, reinterpret_cast<const char*>(mine.data()),
                 reinterpret_cast<char*>(output.data())}});
    bool fine = true;
    for (int64_t row = 0; row < 2 * kRows; ++row) {
      const std::vector<float>& from = row < kRows ? mine : theirs;
      const float* is = output.data() + row * width;
      fine &= std::memcmp(is, from.data() + row % kRows * columns, 4 * columns) == 0;
      fine &= is[columns] == 7;
    }
    CHECK(fine);
  });
  CHECK(all_fine(errors));
}

// Two exchanges in flight at once, waited for in reverse order.
void exchanges_overlap() {
  World world(2);
  const int64_t cells = 100'000;
  const auto errors = world.run([&](HostCommunicator& me, int rank) {
    StageBoxes boxes;
    boxes.sends = {{1 - rank, {{0, cells}}}};
    boxes.receives = {{1 - rank, {{0, cells}}}};
    const BoundStage stage(Dtype::kFloat32, {1}, {1}, cells, 0, false, false, false, boxes);
    const std::vector<float> first(cells, rank), second(cells, 10 + rank);
    std::vector<float> from_first(cells), from_second(cells);
    const Signature one = signature_of("one"), two = signature_of("two");
    const auto call = [&](const std::vector<float>& in, std::vector<float>& out) {
      return std::vector<StageCall>{
          {&stage, reinterpret_cast<const char*>(in.data()), reinterpret_cast<char*>(out.data())}};
    };
    Exchange a(me, one, call(first, from_first));
    Exchange b(me, two, call(second, from_second));
    b.wait(0);
    CHECK(from_second == std::vector<float>(cells, 11 - rank));
    a.wait(0);
    CHECK(from_first == std::vector<float>(cells, 1 - rank));
  });
  CHECK(all_fine(errors));
}

void an_exchange_that_is_dropped_ends_the_world() {
  World world(2, 1);
  const std::vector<float> values(10);
  std::vector<float> output(10);
  StageBoxes boxes;
  boxes.receives = {{1, {{0, 10}}}};
  const BoundStage stage(Dtype::kFloat32, {1}, {1}, 10, 0, false, false, false, boxes);
  const Signature signature = signature_of("dropped");
  {
    const Exchange dropped(world[0], signature,
                           {{&stage, nullptr, reinterpret_cast<char*>(output.data())}});
  }
  bool refused = false;
  try {
    world[0].begin(signature);
  } catch (const TransportError&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

void test_stages() {
  for (bool takes_turns : {false, true}) sums_of_the_same_cells_stream(takes_turns);
  for (int64_t part : {1, 1000, 100'000}) sums_are_sent_on(part);
  // Rows of 4 KB in turns, and of 140 KB past the cache.
  for (int64_t columns : {3, 1001, 35'001}) {
    for (bool takes_turns : {false, true}) large_moves_let_messages_pass(columns, takes_turns);
  }
  exchanges_overlap();
  an_exchange_that_is_dropped_ends_the_world();
  sums_are_in_the_order_of_the_receives(false);
  sums_are_in_the_order_of_the_receives(true);
  narrow_sums_are_rounded_once();
  stages_run_together();
  a_stage_may_be_local();
}
