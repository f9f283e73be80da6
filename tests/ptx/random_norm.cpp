// Random normalizations: the compiled kernels against the same bodies on the host, to the bit, and
// both against loops in float64.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/norm_plan.h"
#include "device/cuda_kernels.h"
#include "launches.h"
#include "runtime.h"

namespace gpudist {

namespace ptx {

namespace {

std::mt19937_64 random_bits;
std::vector<Range> live;
std::string fault_text;

int64_t between(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_bits);
}
bool one_of(int64_t count) {
  return between(1, count) == 1;
}

// Memory of exactly `bytes` bytes, at an address that is a multiple of `alignment` alone.
class Memory {
 public:
  Memory(int64_t bytes, int64_t alignment, const char* kind) : bytes_(bytes), kind_(kind) {
    constexpr int64_t kMost = 16;
    words_.resize(bytes / 16 + 4);
    for (Words& word : words_) word = {random_bits(), random_bits()};
    shift_ = alignment % kMost;
  }

  char* data() { return reinterpret_cast<char*>(words_.data()) + 16 + shift_; }
  double* numbers() { return reinterpret_cast<double*>(data()); }
  int64_t bytes() const { return bytes_; }
  void make_live() {
    const auto begin = reinterpret_cast<uint64_t>(data());
    if (bytes_ > 0) live.push_back({begin, begin + static_cast<uint64_t>(bytes_), kind_});
  }

 private:
  struct alignas(16) Words {
    uint64_t words[2];
  };
  std::vector<Words> words_;
  int64_t bytes_;
  int64_t shift_ = 0;
  const char* kind_;
};

enum Part {
  kX,
  kGradient,
  kY,
  kOfX,
  kSums,
  kTotals,
  kOfSums,
  kOfTotals,
  kWorkspace,
  kWeight,
  kBias,
  kOfWeight,
  kOfBias,
  kRunningMean,
  kRunningVariance,
  kBatches,
  kParts
};

struct Given {
  NormShape shape;
  Dtype parameter_dtype;
  Dtype running_dtype;
  bool has_weight, has_bias, has_running, is_cumulative;
  bool is_extreme;  // results leave the range of normal 16-bit numbers, or are NaN
  double mean;
  std::vector<Memory> memory;
  int multiprocessors;

  int64_t lines() const { return shape.outer * shape.channels; }
  int64_t items() const { return lines() * shape.cells; }
  int64_t statistics() const { return (shape.shares_outer ? 1 : shape.outer) * shape.groups; }
  int64_t width() const { return shape.subtracts_mean ? 2 : 1; }
  int64_t parameters() const {
    return shape.walk == NormWalk::kCells ? shape.cells : shape.channels;
  }
  int64_t statistic(int64_t outer, int64_t channel) const {
    const int64_t group = (channel + shape.group_offset) / shape.group_size;
    return shape.shares_outer ? group : outer * shape.groups + group;
  }
  int64_t place(int64_t outer, int64_t channel, int64_t cell) const {
    return shape.walk == NormWalk::kColumns
               ? (outer * shape.cells + cell) * shape.channels + channel
               : (outer * shape.channels + channel) * shape.cells + cell;
  }
};

using Memories = std::vector<Memory>;

NormTensors tensors_of(const Given& given, Memories& memory) {
  NormTensors t;
  t.x = memory[kX].data();
  t.totals = memory[kTotals].numbers();
  t.workspace = memory[kWorkspace].numbers();
  if (given.has_weight) t.weight = memory[kWeight].data();
  if (given.has_bias) t.bias = memory[kBias].data();
  t.parameter_dtype = given.parameter_dtype;
  return t;
}

// The six calls, of which some have no blocks. `between_calls(number)` prepares what moves.
std::vector<NormCall> calls_of(const Given& given, Memories& memory) {
  const NormPlan plan(given.shape, static_cast<uint32_t>(given.multiprocessors));
  NormTensors t = tensors_of(given, memory);
  std::vector<NormCall> calls;
  t.sums = memory[kSums].numbers();
  calls.push_back(plan.sums(t));
  calls.push_back(plan.finish_sums(calls.back()));
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
  calls.push_back(plan.normalize(t, running));
  t.result = nullptr;
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
  calls.push_back(plan.gradient(t));
  return calls;
}

double value(const Memory& memory, int64_t item, Dtype dtype) {
  return norming::value_at(const_cast<Memory&>(memory).data(), item, dtype);
}

void fill(Memory& memory, int64_t count, Dtype dtype, double mean, double deviation) {
  std::normal_distribution<double> normal(mean, deviation);
  for (int64_t i = 0; i < count; ++i) {
    norming::put_value(memory.data(), i, dtype, static_cast<float>(normal(random_bits)));
  }
}

Given make(uint64_t index) {
  Given given{};
  NormShape& shape = given.shape;
  constexpr NormWalk kWalks[] = {NormWalk::kRows, NormWalk::kColumns, NormWalk::kCells};
  constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};
  static_assert(kLaunchClasses % (3 * 4) == 0);
  shape.walk = kWalks[index % 3];
  const uint64_t kind = index / 3 % 4;
  const bool is_single = kind == 3;
  shape.dtype = kDtypes[is_single ? between(0, 2) : static_cast<int64_t>(kind)];
  given.parameter_dtype = kDtypes[between(0, 2)];
  given.running_dtype = kDtypes[between(0, 2)];
  shape.subtracts_mean = !one_of(4);
  const int64_t most = index >= kFirstLarge ? 60'000 : one_of(8) ? 20'000 : one_of(3) ? 3'000 : 400;
  const bool of_cells = shape.walk == NormWalk::kCells;
  shape.channels = of_cells ? 1 : between(1, one_of(3) ? 150 : 9);
  shape.outer = between(1, of_cells ? (one_of(2) ? 900 : 40) : 5);
  shape.cells = std::max<int64_t>(1, between(1, most) / (shape.channels * shape.outer));
  if (of_cells && one_of(3)) shape.cells = between(1, 20);
  if (of_cells && one_of(3)) {
    shape.outer = between(1, 12);
    shape.cells = between(500, 5'000);
  }
  if (!of_cells && one_of(8)) {
    // As many lines as blocks of threads: each takes several steps along its line.
    shape.outer = between(4, 5);
    shape.channels = between(4, 5);
    shape.cells = between(4'000, 9'000);
  }
  int64_t& contiguous = shape.walk == NormWalk::kColumns ? shape.channels : shape.cells;
  if (!is_single) {
    contiguous = (contiguous + 3) / 4 * 4;
  } else if (contiguous % 4 == 0 && one_of(2)) {
    ++contiguous;
  }
  shape.groups = shape.channels;
  shape.group_size = 1;
  if (!of_cells && one_of(2)) {
    shape.group_size = between(1, shape.channels + 2);
    shape.group_offset = between(0, 2 * shape.group_size);
    shape.groups = (shape.channels - 1 + shape.group_offset) / shape.group_size + 1 + between(0, 2);
  } else if (!of_cells) {
    shape.shares_outer = one_of(2);
  }
  shape.eps = 1e-3;
  given.has_weight = !one_of(4);
  given.has_bias = given.has_weight && !one_of(4);
  given.has_running = shape.shares_outer && shape.subtracts_mean && one_of(2);
  given.is_cumulative = one_of(2);
  given.is_extreme = one_of(8);
  given.mean = one_of(3) ? 1e3 : one_of(2) ? 3 : 0;
  given.multiprocessors = static_cast<int>(between(1, 3));
  // Of a group of full size; other workers have as many cells.
  shape.count = static_cast<double>(2 * shape.cells * shape.group_size *
                                    (shape.shares_outer ? shape.outer : 1));
  const NormPlan plan(shape, static_cast<uint32_t>(given.multiprocessors));
  const int64_t item = item_bytes(shape.dtype), of_parameter = item_bytes(given.parameter_dtype);
  const int64_t numbers = 8 * given.width() * given.statistics();
  const int64_t parameters = given.parameters() * of_parameter;
  const int64_t of_running =
      given.has_running ? shape.channels * item_bytes(given.running_dtype) : 0;
  // Unaligned tensors take single cells.
  const auto aligned = [&] { return is_single && one_of(2) ? item : 0; };
  const int64_t block = given.items() * item;
  const int64_t sizes[kParts] = {block,
                                 block,
                                 block,
                                 block,
                                 numbers,
                                 numbers,
                                 numbers,
                                 numbers,
                                 8 * plan.workspace(),
                                 given.has_weight ? parameters : 0,
                                 given.has_bias ? parameters : 0,
                                 given.has_weight ? parameters : 0,
                                 given.has_bias ? parameters : 0,
                                 of_running,
                                 of_running,
                                 8};
  static const char* const names[kParts] = {"x",
                                            "the gradient",
                                            "y",
                                            "the gradient of x",
                                            "the sums",
                                            "the totals",
                                            "the gradient sums",
                                            "the gradient totals",
                                            "the workspace",
                                            "the weight",
                                            "the bias",
                                            "the weight's gradient",
                                            "the bias's gradient",
                                            "the running mean",
                                            "the running variance",
                                            "the batches"};
  for (int part = 0; part < kParts; ++part) {
    const bool is_block = part <= kOfX;
    given.memory.emplace_back(sizes[part], is_block ? aligned() : 0, names[part]);
  }
  Memories& memory = given.memory;
  fill(memory[kX], given.items(), shape.dtype, given.mean, 1);
  fill(memory[kGradient], given.items(), shape.dtype, 0.25, 1);
  for (const Part part : {kWeight, kBias}) {
    const double scale = !given.is_extreme ? 1 : one_of(2) ? 1e-6 : 6e4;
    if (memory[part].bytes() == 0) continue;
    fill(memory[part], given.parameters(), given.parameter_dtype, scale, scale);
  }
  for (const Part part : {kRunningMean, kRunningVariance}) {
    const double scale = !given.is_extreme ? 1 : one_of(2) ? 1e-6 : 6e4;
    if (given.has_running) fill(memory[part], shape.channels, given.running_dtype, scale, scale);
  }
  if (given.is_extreme && one_of(3)) {
    norming::put_value(memory[kX].data(), between(0, given.items() - 1), shape.dtype, NAN);
  }
  *reinterpret_cast<int64_t*>(memory[kBatches].data()) = between(1, 9);
  return given;
}

// --- Loops in float64 ----------------------------------------------------------------------------

// Largest error of results relative to the largest expected number; `allowed` for float32.
std::string compare(const Memory& found, const std::vector<double>& expected, Dtype dtype,
                    double allowed, const char* what, double largest = 1e-3) {
  double error = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::fabs(expected[i]));
    const double is = dtype == Dtype::kFloat64 ? const_cast<Memory&>(found).numbers()[i]
                                               : value(found, static_cast<int64_t>(i), dtype);
    const double difference = std::fabs(is - expected[i]);
    error = difference <= error ? error : difference;
  }
  if (dtype == Dtype::kBfloat16) allowed += 5e-3;
  if (dtype == Dtype::kFloat16) allowed += 6e-4;
  if (error <= allowed * largest) return "";
  return std::string(what) + ": an error of " + std::to_string(error / largest * 1e6) +
         " millionths";
}

struct Plain {
  std::vector<double> sums, totals, y, of_sums, of_totals, of_x, of_weight, of_bias;
  double largest_term = 0;  // of the gradient of x, where its terms may cancel
};

// What the passes have to compute. The totals are twice the sums, as of two equal workers.
Plain plain_sums(const Given& given, const Memories& memory) {
  Plain plain;
  const NormShape& shape = given.shape;
  plain.sums.resize(given.width() * given.statistics());
  for (int64_t o = 0; o < shape.outer; ++o) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      double* const own = &plain.sums[given.width() * given.statistic(o, c)];
      for (int64_t i = 0; i < shape.cells; ++i) {
        const double x = value(memory[kX], given.place(o, c, i), shape.dtype);
        if (shape.subtracts_mean) own[0] += x;
        own[given.width() - 1] += x * x;
      }
    }
  }
  return plain;
}

void plain_rest(const Given& given, Memories& memory, Plain& plain) {
  const NormShape& shape = given.shape;
  const int64_t width = given.width();
  const double* const totals = memory[kTotals].numbers();
  const double* const of_totals = memory[kOfTotals].numbers();
  plain.y.resize(given.items());
  plain.of_x.resize(given.items());
  plain.of_sums.assign(width * given.statistics(), 0);
  plain.of_weight.assign(given.parameters(), 0);
  plain.of_bias.assign(given.parameters(), 0);
  for (int64_t o = 0; o < shape.outer; ++o) {
    for (int64_t c = 0; c < shape.channels; ++c) {
      const int64_t s = given.statistic(o, c);
      const double mean = shape.subtracts_mean ? totals[width * s] / shape.count : 0;
      double variance = totals[width * s + width - 1] / shape.count - mean * mean;
      if (shape.subtracts_mean) variance = std::max(0.0, variance);
      const double inverse = 1 / std::sqrt(variance + shape.eps);
      for (int64_t i = 0; i < shape.cells; ++i) {
        const int64_t at = given.place(o, c, i), p = shape.walk == NormWalk::kCells ? i : c;
        const double x = value(memory[kX], at, shape.dtype);
        const double g = value(memory[kGradient], at, shape.dtype);
        const double w = given.has_weight ? value(memory[kWeight], p, given.parameter_dtype) : 1;
        const double b = given.has_bias ? value(memory[kBias], p, given.parameter_dtype) : 0;
        const double z = (x - mean) * inverse;
        plain.y[at] = z * w + b;
        plain.of_weight[p] += g * z;
        plain.of_bias[p] += g;
        const double of_square =
            -0.5 * inverse * inverse * inverse * g * w * (x - mean) / shape.count;
        plain.of_sums[width * s + width - 1] += of_square;
        if (shape.subtracts_mean) {
          plain.of_sums[width * s] -= inverse * g * w / shape.count + 2 * mean * of_square;
        }
        const double slope = 2 * of_totals[width * s + width - 1];
        plain.largest_term = std::max(plain.largest_term, std::fabs(g * w * inverse));
        plain.of_x[at] =
            g * w * inverse + slope * x + (shape.subtracts_mean ? of_totals[width * s] : 0);
      }
    }
  }
}

std::string against_plain(const Given& given, Memories& memory, Plain& plain) {
  const NormShape& shape = given.shape;
  plain_rest(given, memory, plain);
  // Totals carry an error of `mean^2 / deviation^2` roundings.
  const double near = 2e-6 + given.mean * given.mean * 1e-12;
  std::string wrong = compare(memory[kSums], plain.sums, Dtype::kFloat64, 1e-6, "sums");
  const auto also = [&](Part part, const std::vector<double>& expected, Dtype dtype, double allowed,
                        const char* what, double largest = 1e-3) {
    if (wrong.empty()) wrong = compare(memory[part], expected, dtype, allowed, what, largest);
  };
  also(kY, plain.y, shape.dtype, near, "y");
  also(kOfSums, plain.of_sums, Dtype::kFloat64, 4e-6, "gradients of sums");
  if (given.has_weight) also(kOfWeight, plain.of_weight, given.parameter_dtype, 1e-5, "of weight");
  if (given.has_bias) also(kOfBias, plain.of_bias, given.parameter_dtype, 1e-5, "of bias");
  also(kOfX, plain.of_x, shape.dtype, near, "of x", plain.largest_term);
  return wrong;
}

// Totals of two equal workers, moved from sums.
void move(Memories& memory, Part sums, Part totals) {
  const int64_t count = memory[sums].bytes() / 8;
  for (int64_t i = 0; i < count; ++i) memory[totals].numbers()[i] = 2 * memory[sums].numbers()[i];
}

std::string describe(const Given& given) {
  const NormShape& shape = given.shape;
  return "walk " + std::to_string(static_cast<int>(shape.walk)) + ", dtype " +
         std::to_string(static_cast<int>(shape.dtype)) + ", shape [" + std::to_string(shape.outer) +
         ", " + std::to_string(shape.channels) + ", " + std::to_string(shape.cells) + "], groups " +
         std::to_string(shape.groups) + " of " + std::to_string(shape.group_size) + " from " +
         std::to_string(shape.group_offset) + ", mean " + std::to_string(given.mean);
}

const char* name_of(NormPass pass) {
  constexpr const char* kNames[] = {"sums",          "finished sums",          "normalize",
                                    "gradient sums", "finished gradient sums", "gradient"};
  return kNames[static_cast<int>(pass)];
}

// Whether all items are equal, or NaN on both sides.
bool are_equal(char* found, char* expected, int64_t bytes, Dtype dtype) {
  for (int64_t i = 0; i < bytes / item_bytes(dtype); ++i) {
    const int64_t at = i * item_bytes(dtype);
    if (std::memcmp(found + at, expected + at, item_bytes(dtype)) == 0) continue;
    if (dtype == Dtype::kFloat64) {
      double a, b;
      std::memcpy(&a, found + at, 8), std::memcpy(&b, expected + at, 8);
      if (!std::isnan(a) || !std::isnan(b)) return false;
    } else if (!std::isnan(norming::value_at(found, i, dtype)) ||
               !std::isnan(norming::value_at(expected, i, dtype))) {
      return false;
    }
  }
  return true;
}

std::string first_difference(const Given& given, Memories& found, Memories& expected) {
  for (int part = 0; part < kParts; ++part) {
    const int64_t bytes = found[part].bytes();
    // Everything beside the block too: a stray store.
    if (std::memcmp(found[part].data() - 16, expected[part].data() - 16, 16) != 0 ||
        std::memcmp(found[part].data() + bytes, expected[part].data() + bytes, 16) != 0) {
      return "a stray store";
    }
    if (std::memcmp(found[part].data(), expected[part].data(), bytes) == 0) continue;
    const Dtype dtype = part <= kOfX      ? given.shape.dtype
                        : part < kWeight  ? Dtype::kFloat64
                        : part <= kOfBias ? given.parameter_dtype
                                          : given.running_dtype;
    if (part == kBatches || !are_equal(found[part].data(), expected[part].data(), bytes, dtype)) {
      return "part " + std::to_string(part) + " differs from the host's";
    }
  }
  return "";
}

}  // namespace

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

std::string run_launch(uint64_t seed, uint64_t index) {
  random_bits.seed(seed * 0x9e3779b97f4a7c15u + index);
  manner().next = seed * 1'000'003 + index;
  Given given = make(index);
  Memories& device = given.memory;
  Memories host = device;
  Plain plain = plain_sums(given, device);
  live.clear();
  for (Memory& memory : device) memory.make_live();
  ++memory_changes();
  const std::vector<NormCall> calls = calls_of(given, device), on_host = calls_of(given, host);
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string name = name_of(calls[i].pass);
    if (calls[i].pass == NormPass::kNormalize)
      move(device, kSums, kTotals), move(host, kSums, kTotals);
    if (calls[i].pass == NormPass::kGradient) {
      move(device, kOfSums, kOfTotals), move(host, kOfSums, kOfTotals);
    }
    fault_text.clear();
    static const int loaded = load_kernels();
    if (loaded != 0) throw std::runtime_error("the kernels were not loaded");
    if (launch_norm(calls[i], nullptr) != 0) throw std::runtime_error("a launch was refused");
    if (!fault_text.empty()) return name + ": " + fault_text;
    run_norm(on_host[i]);
    const std::string difference = first_difference(given, device, host);
    if (!difference.empty()) return name + ": " + difference;
  }
  const std::string wrong = given.is_extreme ? "" : against_plain(given, host, plain);
  return wrong.empty() ? "" : wrong + ", " + describe(given);
}

}  // namespace ptx

}  // namespace gpudist
