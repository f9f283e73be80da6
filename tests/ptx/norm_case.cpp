#include "norm_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "core/norm_body.h"
#include "launches.h"
#include "random_case.h"

namespace gpudist::ptx {

namespace {

constexpr int64_t kBorder = int64_t{1} << 32;

// Multiples of 4 GiB around which no memory lies.
std::vector<char*>& free_borders() {
  static auto& borders = *new std::vector<char*>;
  return borders;
}

constexpr NormWalk kWalks[] = {NormWalk::kRows, NormWalk::kColumns, NormWalk::kCells};
constexpr Dtype kDtypes[] = {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16};
// Each walk takes four cells of each dtype together, or single ones of any dtype, float64 always;
// results of 16-bit cells may be float32.
struct Kind {
  Dtype dtype;  // of wide cells
  bool is_single, is_widened;
};
constexpr Kind kKinds[] = {
    {Dtype::kFloat32, false, false},  {Dtype::kFloat16, false, false},
    {Dtype::kBfloat16, false, false}, {Dtype::kFloat32, true, false},
    {Dtype::kFloat64, true, false},   {Dtype::kFloat16, false, true},
    {Dtype::kBfloat16, false, true},  {Dtype::kFloat32, true, true},
};
constexpr uint64_t kClasses = std::size(kWalks) * std::size(kKinds);
static_assert(kLaunchClasses % kClasses == 0);
constexpr int64_t kThreads = NormArguments::kThreads;

void fill(Memory& memory, int64_t count, Dtype dtype, double mean, double deviation) {
  std::normal_distribution<double> normal(mean, deviation);
  for (int64_t i = 0; i < count; ++i) {
    put_item(memory.data(), i, dtype, normal(random_bits));
  }
}

// Few cells, in any number of lines.
void set_short(NormShape& shape, bool is_large) {
  const int64_t most = is_large ? 60'000 : one_of(3) ? 4'000 : 400;
  const bool of_cells = shape.walk == NormWalk::kCells;
  // More channels than a block has threads, too.
  shape.channels = of_cells ? 1 : between(1, one_of(3) ? (one_of(3) ? 700 : 150) : 9);
  shape.outer = between(1, of_cells ? (one_of(2) ? 900 : 40) : 5);
  shape.cells = std::max<int64_t>(1, between(1, most) / (shape.channels * shape.outer));
  if (!of_cells || one_of(3)) return;
  if (one_of(2)) {
    shape.cells = between(1, 20);
  } else {
    shape.outer = between(1, 8);
    shape.cells = between(500, 2'500);
  }
}

// For one multiprocessor: lines in several parts, or so many lines that each block of threads takes
// several steps along its own.
void set_long(NormShape& shape, int64_t width, int64_t loads) {
  const int64_t step = kThreads * loads;
  shape.channels = 1;
  if (shape.walk == NormWalk::kColumns) {
    shape.outer = between(4, 5);
    shape.channels = width;
    shape.cells =
        between(4, 5) * step + (one_of(2) ? kThreads * between(1, loads - 1) : between(1, step));
  } else if (shape.walk == NormWalk::kCells && one_of(3)) {
    // Gradients are summed over tiles of at most 32 lines.
    shape.outer = between(530, 600);
    shape.cells = between(17, 32) * width;
  } else if (one_of(2)) {
    shape.outer = between(16, 20);
    if (shape.walk == NormWalk::kRows && one_of(2)) std::swap(shape.outer, shape.channels);
    // The last of several loads may begin where the tensor ends.
    shape.cells = step * width +
                  (one_of(2) ? kThreads * width * between(1, loads - 1) : between(1, step / 2));
  } else {
    shape.outer = between(1, 3);
    shape.cells = between(1, 4) * step * width + between(1, step);
  }
}

void set_statistics(NormShape& shape) {
  shape.groups = shape.channels;
  shape.group_size = 1;
  if (shape.walk == NormWalk::kCells) return;
  if (one_of(3)) {
    shape.group_size = between(1, shape.channels + 2);
    shape.group_offset = between(0, 2 * shape.group_size);
    shape.groups = (shape.channels - 1 + shape.group_offset) / shape.group_size + 1 + between(0, 2);
  } else {
    shape.shares_outer = !one_of(3);
  }
}

void set_shape(NormShape& shape, bool is_long, bool is_large, bool is_single) {
  if (!is_long) {
    set_short(shape, is_large);
  } else {
    const auto loads =
        norming::loads_of(NormPass::kNormalize, shape.dtype, shape.result_dtype, !is_single)
            .of_rows;
    set_long(shape, is_single ? 1 : 4, loads);
  }
  int64_t& contiguous = shape.walk == NormWalk::kColumns ? shape.channels : shape.cells;
  if (!is_single) {
    contiguous = (contiguous + 3) / 4 * 4;
  } else if (contiguous % 4 == 0 && one_of(2)) {
    ++contiguous;
  }
  set_statistics(shape);
}

void make_memory(NormCase& made, bool is_single) {
  const NormPlan plan(made.shape, static_cast<uint32_t>(made.multiprocessors));
  // Unaligned tensors take single cells.
  const auto add = [&](int64_t items, int64_t bytes, bool may_move, const char* kind) {
    const bool moves = is_single && may_move && one_of(2);
    made.memory.emplace_back(items * bytes, moves ? bytes : 0, kind);
  };
  const int64_t item = item_bytes(made.shape.dtype), parameter = item_bytes(made.parameter_dtype);
  const int64_t result = item_bytes(made.shape.result_dtype);
  add(made.items(), item, true, "x");
  add(made.items(), result, true, "the gradient");
  add(made.items(), result, true, "y");
  add(made.items(), item, true, "the gradient of x");
  for (const char* kind :
       {"the sums", "the shifts", "the totals", "the gradient sums", "the gradient totals"}) {
    add(made.width() * made.statistics(), 8, false, kind);
  }
  add(plan.workspace(), 8, false, "the workspace");
  const int64_t weights = made.has_weight ? made.parameters() : 0;
  const int64_t biases = made.has_bias ? made.parameters() : 0;
  add(weights, parameter, true, "the weight");
  add(biases, parameter, true, "the bias");
  add(weights, parameter, true, "the weight's gradient");
  add(biases, parameter, true, "the bias's gradient");
  const int64_t running = made.has_running ? made.shape.channels : 0;
  add(running, item_bytes(made.running_dtype), true, "the running mean");
  add(running, item_bytes(made.running_dtype), true, "the running variance");
  add(1, 8, false, "the batches");
  add(1, 8, false, "the failed word");
}

void fill_memory(NormCase& made) {
  Memories& memory = made.memory;
  const Dtype dtype = made.shape.dtype;
  fill(memory[kX], made.items(), dtype, made.mean, 1);
  fill(memory[kGradient], made.items(), made.shape.result_dtype, 0.125, 1);
  const auto fill_scaled = [&](Part part, int64_t count, Dtype of_part) {
    const double scale = !made.is_extreme ? 1 : one_of(2) ? 1e-6 : 6e4;
    if (memory[part].bytes() > 0) fill(memory[part], count, of_part, scale, scale);
  };
  for (const Part part : {kWeight, kBias}) {
    fill_scaled(part, made.parameters(), made.parameter_dtype);
  }
  for (const Part part : {kRunningMean, kRunningVariance}) {
    fill_scaled(part, made.shape.channels, made.running_dtype);
  }
  if (made.is_extreme && one_of(3)) {
    put_item(memory[kX].data(), between(0, made.items() - 1), dtype, NAN);
  }
  if (made.is_extreme && made.has_weight && one_of(2)) {
    // Results of one channel or cell are NaN, beside others.
    put_item(memory[kWeight].data(), between(0, made.parameters() - 1), made.parameter_dtype, NAN);
  }
  // Also more than 32 bits hold.
  const int64_t batches = between(1, 9) + (one_of(2) ? int64_t{1} << 32 : 0);
  *reinterpret_cast<int64_t*>(memory[kBatches].data()) = batches;
  *reinterpret_cast<uint32_t*>(memory[kFailedWord].data()) = 0;  // what follows it is not
}

}  // namespace

Memory::Memory(int64_t bytes, int64_t alignment, const char* kind)
    : bytes_(bytes), shift_(alignment % 16), kind_(kind) {
  place();
  for (int64_t i = 0; i < bytes_ + 2 * kGap; i += 8) {
    const uint64_t bits = random_bits();
    std::memcpy(begin_ + i, &bits, std::min<int64_t>(8, bytes_ + 2 * kGap - i));
  }
}

Memory::Memory(const Memory& other)
    : bytes_(other.bytes_), shift_(other.shift_), kind_(other.kind_) {
  place();
  std::memcpy(begin_, other.begin_, bytes_ + 2 * kGap);
}

Memory::Memory(Memory&& other) noexcept
    : border_(std::exchange(other.border_, nullptr)),
      begin_(other.begin_),
      bytes_(other.bytes_),
      shift_(other.shift_),
      kind_(other.kind_) {}

Memory::~Memory() {
  if (border_ != nullptr) free_borders().push_back(border_);
}

void Memory::place() {
  if (free_borders().empty()) {
    constexpr int64_t kBorders = 64;
    char* const made = reserve((kBorders + 2) * kBorder);
    const int64_t to_border = kBorder - reinterpret_cast<intptr_t>(made) % kBorder;
    for (int64_t i = 0; i < kBorders; ++i) {
      free_borders().push_back(made + to_border + i * kBorder);
    }
  }
  border_ = free_borders().back();
  free_borders().pop_back();
  begin_ = border_ + shift_ - kGap - (one_of(2) ? 16 * between(0, bytes_ / 16) : 0);
}

void put_item(char* to, int64_t item, Dtype dtype, double value) {
  if (dtype == Dtype::kFloat64) return norming::put_value(to, item, dtype, value);
  norming::put_value(to, item, dtype, static_cast<float>(value));
}

double item_of(const char* from, int64_t item, Dtype dtype) {
  return dtype == Dtype::kFloat64 ? norming::value_at<double>(from, item, dtype)
                                  : norming::value_at(from, item, dtype);
}

double value_of(const Memory& memory, int64_t item, Dtype dtype) {
  return item_of(memory.data(), item, dtype);
}

NormCase random_norm(uint64_t index) {
  NormCase made{};
  NormShape& shape = made.shape;
  shape.walk = kWalks[index % 3];
  const auto [dtype, is_single, is_widened] = kKinds[index / 3 % std::size(kKinds)];
  const uint64_t turn = index / kClasses;
  const bool is_long = turn % 4 == 3;
  const bool is_double = dtype == Dtype::kFloat64;
  shape.dtype = is_single && !is_double ? kDtypes[turn % 3] : dtype;
  shape.result_dtype = is_widened ? Dtype::kFloat32 : shape.dtype;
  made.parameter_dtype = is_double ? dtype : kDtypes[(turn + turn / 3) % 3];
  made.running_dtype = is_double ? dtype : kDtypes[between(0, 2)];
  shape.subtracts_mean = !one_of(4);
  set_shape(shape, is_long, index >= kFirstLarge, is_single);
  shape.eps = 1e-3;
  made.is_single = is_single;
  made.is_far = one_of(index >= kFirstLarge ? 2 : 25);
  made.has_weight = !one_of(4);
  made.has_bias = made.has_weight && !one_of(4);
  made.has_running = shape.shares_outer && shape.subtracts_mean && !one_of(4);
  made.is_cumulative = one_of(2);
  made.has_shifts = is_double && shape.subtracts_mean;
  made.is_extreme = one_of(8);
  made.failure = one_of(2) ? Failure::kNoWord : static_cast<Failure>(between(1, 3));
  made.mean = one_of(3) ? 1e4 : one_of(2) ? 3 : 0;
  made.multiprocessors = is_long ? 1 : static_cast<int>(between(1, 3));
  // Values of a group of full size; other workers have as many cells.
  shape.count = static_cast<double>(2 * shape.cells * shape.group_size *
                                    (shape.shares_outer ? shape.outer : 1));
  make_memory(made, is_single);
  fill_memory(made);
  return made;
}

}  // namespace gpudist::ptx
