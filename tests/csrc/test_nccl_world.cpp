// Ranks of the NCCL world as threads, over the doubles: interactions of the watchdog, callers and
// an abort from another thread.
#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "nccl/device_stage.h"
#include "nccl/nccl_world.h"
#include "test.h"
#include "world.h"

namespace {

using namespace gpudist;
using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3;
constexpr int64_t kCells = 1000;

const NcclApi& nccl() {
  static const NcclApi& api = load_nccl(GPUDIST_NCCL_DOUBLE, {});
  return api;
}

CombineBox copied(Buffer to, int64_t to_offset, Buffer from, int64_t from_offset) {
  return {{kCells}, {{to, to_offset, {1}}, {from, from_offset, {1}}}, false};
}

// Send every second cell to the right and receive as many from the left; the output is the sum of
// this rank's cells and the received ones.
std::unique_ptr<DeviceStage> ring(NcclWorld& world, int rank) {
  CombineBox packed{{kCells}, {{Buffer::kSent, 0, {1}}, {Buffer::kInput, 0, {2}}}, false};
  CombineBox sum = copied(Buffer::kOutput, 0, Buffer::kInput, 0);
  sum.views.push_back({Buffer::kReceived, 0, {1}});
  const int64_t bytes = kCells * 4;
  const auto count = static_cast<size_t>(bytes);
  std::vector<WireStep> steps{
      {WireKind::kSend, nullptr, (rank + 1) % kRanks, Buffer::kSent, 0, Buffer::kSent, 0, count,
       kNcclUint8, 0},
      {WireKind::kReceive, nullptr, (rank + kRanks - 1) % kRanks, Buffer::kReceived, 0,
       Buffer::kReceived, 0, count, kNcclUint8, 0},
  };
  return std::make_unique<DeviceStage>(
      world.operations(), CombinePlan(Dtype::kFloat32, 0, {packed}),
      CombinePlan(Dtype::kFloat32, 0, {sum}), std::move(steps), bytes, bytes, nullptr);
}

struct Rank {
  Rank(int rank, double timeout_s)
      : world(&nccl(), device_api(GPUDIST_NCCL_DOUBLE), 0, rank, timeout_s, [] {}, [] {}) {}

  NcclWorld world;
  std::unique_ptr<DeviceStage> stage;
  std::vector<float> input = std::vector<float>(2 * kCells);
  std::vector<float> output = std::vector<float>(kCells);
};

using Ranks = std::vector<std::unique_ptr<Rank>>;

template <class Body>
std::vector<std::exception_ptr> in_threads(Ranks& ranks, Body body) {
  std::vector<std::exception_ptr> errors(ranks.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(*ranks[rank], rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

Ranks joined(double timeout_s) {
  Ranks ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<Rank>(rank, timeout_s));
  }
  const std::string id = ranks[0]->world.new_id();
  const auto errors = in_threads(ranks, [&](Rank& mine, int rank) {
    mine.world.connect(id, {0, 1, 2});
    mine.stage = ring(mine.world, rank);
    for (int64_t i = 0; i < 2 * kCells; ++i) mine.input[i] = static_cast<float>(10 * i + rank);
  });
  CHECK(all_fine(errors));
  return ranks;
}

DeviceCall call_of(Rank& mine) {
  return {mine.stage.get(), reinterpret_cast<char*>(mine.input.data()),
          reinterpret_cast<char*>(mine.output.data())};
}

bool is_right(const Rank& mine, int rank) {
  for (int64_t i = 0; i < kCells; ++i) {
    const int64_t came = 20 * i + (rank + kRanks - 1) % kRanks;
    if (mine.output[i] != mine.input[i] + static_cast<float>(came)) return false;
  }
  return true;
}

void test_rounds_on_both_streams() {
  Ranks ranks = joined(60);
  const auto errors = in_threads(ranks, [](Rank& mine, int rank) {
    for (int round = 0; round < 20; ++round) {
      std::fill(mine.output.begin(), mine.output.end(), 0.0f);
      mine.world.run(signature_of("ring"), {call_of(mine)}, nullptr);
      CHECK(is_right(mine, rank));
      std::fill(mine.output.begin(), mine.output.end(), 0.0f);
      const DeviceEvent event = mine.world.start(signature_of("ring"), {call_of(mine)}, nullptr);
      mine.world.join(event, nullptr);
      CHECK(is_right(mine, rank));
    }
    mine.world.synchronize(nullptr);
    mine.world.close(10);
  });
  CHECK(all_fine(errors));
}

void test_abort_from_another_thread() {
  Ranks ranks = joined(60);
  std::atomic<int> hanging{0};
  std::thread aborting([&] {
    while (hanging < kRanks - 1) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    for (const auto& rank : ranks) rank->world.watchdog().fail("somebody failed");
  });
  const auto began = Clock::now();
  const auto errors = in_threads(ranks, [&](Rank& mine, int rank) {
    if (rank == 2) return;  // the others wait for this rank
    ++hanging;
    mine.world.run(signature_of("ring"), {call_of(mine)}, nullptr);
  });
  aborting.join();
  CHECK(Clock::now() - began < std::chrono::seconds(10));
  for (int rank = 0; rank < kRanks - 1; ++rank) {
    CHECK(!text_of<WorldFailed>(errors[rank]).empty());
    CHECK(ranks[rank]->world.watchdog().failure() == "somebody failed");
  }
  const auto later = in_threads(ranks, [](Rank& mine, int) {
    mine.world.run(signature_of("ring"), {call_of(mine)}, nullptr);
  });
  for (const auto& error : later) CHECK(!text_of<WorldFailed>(error).empty());
}

void test_results_under_way_become_not_a_number() {
  Ranks ranks = joined(60);
  const auto errors = in_threads(ranks, [](Rank& mine, int rank) {
    mine.world.run(signature_of("ring"), {call_of(mine)}, nullptr);
    if (rank == 2) return;
    // start() returns at once: the work runs on a separate stream.
    const DeviceEvent event = mine.world.start(signature_of("ring"), {call_of(mine)}, nullptr);
    mine.world.watchdog().fail("somebody failed");
    try {
      mine.world.join(event, nullptr);
    } catch (const WorldFailed&) {
    }
    for (float cell : mine.output) {
      if (!CHECK(cell != cell)) break;
    }
  });
  CHECK(all_fine(errors));
}

void test_an_operation_that_is_late() {
  Ranks ranks = joined(0.2);
  const auto errors = in_threads(ranks, [](Rank& mine, int rank) {
    if (rank == 2) return;
    mine.world.run(signature_of("ring"), {call_of(mine)}, nullptr);
  });
  for (int rank = 0; rank < kRanks - 1; ++rank) {
    CHECK(!text_of<WorldFailed>(errors[rank]).empty());
    const auto problem = ranks[rank]->world.watchdog().next_problem();
    CHECK(problem && problem->cause == Watchdog::Problem::Cause::kExpired);
    // No caller has answered the watchdog's report.
    CHECK(ranks[rank]->world.watchdog().failure().find("CollectiveTimeout") != std::string::npos);
  }
}

}  // namespace

void test_nccl_world() {
  test_rounds_on_both_streams();
  test_abort_from_another_thread();
  test_results_under_way_become_not_a_number();
  test_an_operation_that_is_late();
}
