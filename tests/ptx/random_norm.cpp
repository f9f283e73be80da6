// Random normalizations: the compiled kernels against the same bodies on the host, to the bit, and
// both against loops in float64.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/norm_body.h"
#include "launches.h"
#include "norm_case.h"
#include "norm_loops.h"
#include "random_case.h"

namespace gpudist {

namespace ptx {

namespace {

NormTensors tensors_of(const NormCase& given, Memories& memory) {
  NormTensors t;
  t.x = memory[kX].data();
  t.totals = memory[kTotals].numbers();
  t.workspace = memory[kWorkspace].numbers();
  if (given.has_weight) t.weight = memory[kWeight].data();
  if (given.has_bias) t.bias = memory[kBias].data();
  t.parameter_dtype = given.parameter_dtype;
  return t;
}

// The six calls, of which some have no blocks; sums of float64 cells take two more.
std::vector<NormCall> calls_of(const NormCase& given, Memories& memory) {
  const NormPlan plan(given.shape, static_cast<uint32_t>(given.multiprocessors));
  NormTensors t = tensors_of(given, memory);
  std::vector<NormCall> calls;
  t.sums = memory[kSums].numbers();
  calls.push_back(plan.sums(t));
  calls.push_back(plan.finish_sums(calls.back()));
  if (given.has_shifts) {
    t.shifts = memory[kShifts].numbers();
    calls.push_back(plan.sums(t));
    calls.push_back(plan.finish_sums(calls.back()));
  }
  t.sums = nullptr;
  t.result = memory[kY].data();
  NormRunning running;
  if (given.has_running) {
    running.mean = memory[kRunningMean].data();
    running.variance = memory[kRunningVariance].data();
    running.dtype = given.running_dtype;
    running.momentum = 0.25;
    if (given.is_cumulative) {
      running.batches = reinterpret_cast<const int64_t*>(memory[kBatches].data());
    }
  }
  const auto* const word = reinterpret_cast<const uint32_t*>(memory[kFailedWord].data());
  if (given.failure != Failure::kNoWord) t.failed = word;
  calls.push_back(plan.normalize(t, running));
  t.result = nullptr;
  t.failed = nullptr;
  t.gradient = memory[kGradient].data();
  t.sums = memory[kOfSums].numbers();
  if (given.has_weight) t.of_weight = memory[kOfWeight].data();
  if (given.has_bias) t.of_bias = memory[kOfBias].data();
  calls.push_back(plan.gradient_sums(t));
  calls.push_back(plan.finish_gradient_sums(calls.back()));
  t.of_weight = t.of_bias = nullptr;
  t.sums = nullptr;
  t.result = memory[kOfX].data();
  t.of_totals = memory[kOfTotals].numbers();
  if (given.failure != Failure::kNoWord) t.failed = word;
  calls.push_back(plan.gradient(t));
  return calls;
}

// Totals of two equal workers, moved from sums.
void move(Memories& memory, Part sums, Part totals) {
  const int64_t count = memory[sums].bytes() / 8;
  for (int64_t i = 0; i < count; ++i) memory[totals].numbers()[i] = 2 * memory[sums].numbers()[i];
}

// Set the failed word if it is time to.
void fail(const NormCase& given, NormPass pass, Memories& memory) {
  if ((pass == NormPass::kNormalize && given.failure == Failure::kBeforeNormalize) ||
      (pass == NormPass::kGradient && given.failure == Failure::kBeforeGradient)) {
    *reinterpret_cast<uint32_t*>(memory[kFailedWord].data()) = 1u << between(0, 31);
  }
}

// After a failure, whatever needs the sums over workers is NaN.
std::string find_number(const NormCase& given, const Memories& memory) {
  std::vector<Part> parts{kOfX};
  if (given.failure == Failure::kBeforeNormalize) {
    parts.insert(parts.end(), {kY, kOfWeight, kRunningMean, kRunningVariance});
  }
  for (const Part part : parts) {
    const int64_t items = memory[part].bytes() / item_bytes(given.dtype(part));
    for (int64_t i = 0; i < items; ++i) {
      if (!std::isnan(value_of(memory[part], i, given.dtype(part)))) {
        return std::string(memory[part].kind()) + " has a number after a failure";
      }
    }
  }
  return "";
}

std::string describe(const NormCase& given) {
  const NormShape& shape = given.shape;
  return "walk " + std::to_string(static_cast<int>(shape.walk)) + ", dtype " +
         std::to_string(static_cast<int>(shape.dtype)) + " to " +
         std::to_string(static_cast<int>(shape.result_dtype)) + ", shape [" +
         std::to_string(shape.outer) + ", " + std::to_string(shape.channels) + ", " +
         std::to_string(shape.cells) + "], groups " + std::to_string(shape.groups) + " of " +
         std::to_string(shape.group_size) + " from " + std::to_string(shape.group_offset) +
         ", mean " + std::to_string(given.mean);
}

const char* name_of(NormPass pass) {
  constexpr const char* kNames[] = {"sums",          "finished sums",          "normalize",
                                    "gradient sums", "finished gradient sums", "gradient"};
  return kNames[static_cast<int>(pass)];
}

std::string first_difference(const NormCase& given, const Memories& found,
                             const Memories& expected) {
  constexpr int64_t kGap = Memory::kGap;
  for (int part = 0; part < kParts; ++part) {
    const Memory &is = found[part], &should_be = expected[part];
    const int64_t bytes = is.bytes();
    if (std::memcmp(is.data() - kGap, should_be.data() - kGap, kGap) != 0 ||
        std::memcmp(is.data() + bytes, should_be.data() + bytes, kGap) != 0) {
      return "a stray store";
    }
    if (!are_equal(is.data(), should_be.data(), bytes, given.dtype(static_cast<Part>(part)))) {
      return std::string(is.kind()) + " differs from the host's";
    }
  }
  return "";
}

}  // namespace

std::string run_launch(uint64_t seed, uint64_t index) {
  begin_launch(seed, index);
  NormCase given = random_norm(index);
  if (given.is_far) return run_far_norm(given.shape, given.parameter_dtype, given.is_single);
  Memories& device = given.memory;
  Memories host = given.memory;
  NormLoops loops(given);
  for (Memory& memory : device) add_live(memory.data(), memory.bytes(), memory.kind());
  const std::vector<NormCall> calls = calls_of(given, device), on_host = calls_of(given, host);
  for (size_t i = 0; i < calls.size(); ++i) {
    for (Memories* memory : {&device, &host}) {
      const bool is_moved = calls[i].arguments.shifts != nullptr;
      if (calls[i].pass == NormPass::kSums && is_moved) move(*memory, kSums, kShifts);
      if (calls[i].pass == NormPass::kNormalize) move(*memory, kSums, kTotals);
      if (calls[i].pass == NormPass::kGradient) move(*memory, kOfSums, kOfTotals);
    }
    fail(given, calls[i].pass, device);
    std::memcpy(host[kFailedWord].data(), device[kFailedWord].data(), sizeof(uint32_t));
    std::string wrong = fault_of(cuda_api()->launch_norm(calls[i], nullptr));
    if (wrong.empty()) {
      for (uint32_t block = 0; block < norm_blocks(on_host[i]); ++block) {
        run_on_host(on_host[i], block);
      }
      wrong = first_difference(given, device, host);
    }
    if (!wrong.empty()) return std::string(name_of(calls[i].pass)) + ": " + wrong;
  }
  const bool fails = given.failure >= Failure::kBeforeNormalize;
  std::string wrong = fails ? find_number(given, host) : "";
  if (!fails && !given.is_extreme) wrong = loops.compare(host);
  return wrong.empty() ? "" : wrong + ", " + describe(given);
}

}  // namespace ptx

}  // namespace gpudist
