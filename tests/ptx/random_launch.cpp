#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "combine_cases.h"
#include "core/combine_plan.h"
#include "launches.h"
#include "random_case.h"

namespace gpudist {

namespace ptx {

namespace {

using combine_cases::Case;

// Size of the tables passed with a launch, for each kernel that takes them that way.
constexpr uint32_t kInlineBytes[] = {1024, 3840, 16384};

// Bytes between rows of cells that are far apart: does not fit in 32 bits.
constexpr int64_t kFarBytes = 5'000'000'000 / 48 * 48;
constexpr int64_t kMostFarRows = 9;

void check(int error, const char* call) {
  if (error != 0) throw std::runtime_error(std::string(call) + " was refused");
}

// Device memory exactly as large as its content.
class Uploaded {
 public:
  Uploaded(const void* from, size_t bytes, bool is_pinned)
      : bytes_(static_cast<const char*>(from), static_cast<const char*>(from) + bytes),
        is_pinned_(is_pinned) {
    const DeviceApi& api = *cuda_api();
    check((is_pinned ? api.allocate_pinned : api.allocate)(&memory_, bytes), "an allocation");
    std::memcpy(memory_, from, bytes);
  }
  Uploaded(const Uploaded&) = delete;
  Uploaded& operator=(const Uploaded&) = delete;
  ~Uploaded() {
    const DeviceApi& api = *cuda_api();
    (is_pinned_ ? api.release_pinned : api.release)(memory_);
  }

  const char* data() const { return static_cast<const char*>(memory_); }
  bool is_unchanged() const { return std::equal(bytes_.begin(), bytes_.end(), data()); }

 private:
  const std::vector<char> bytes_;
  const bool is_pinned_;
  void* memory_ = nullptr;
};

// Jobs, then views, with a gap between them so that the size selects `kind`; 0 stands for tables in
// device memory.
std::vector<char> tables_of(const CombineTable& table, size_t kind, size_t* views_offset) {
  const size_t jobs_bytes = table.jobs.size() * sizeof(table.jobs[0]);
  const size_t views_bytes = table.views.size() * sizeof(table.views[0]);
  *views_offset = (jobs_bytes + 15) / 16 * 16;
  if (kind > 1) *views_offset = std::max<size_t>(*views_offset, kInlineBytes[kind - 2]);
  std::vector<char> tables(*views_offset + views_bytes);
  std::memcpy(tables.data(), table.jobs.data(), jobs_bytes);
  std::memcpy(tables.data() + *views_offset, table.views.data(), views_bytes);
  return tables;
}

// Run one launch through the table that the native core uses.
std::string launch(const CombinePlan& plan, const CombineTable& table, size_t kind,
                   char* const (&buffers)[kBuffers], bool has_word, uint32_t failed) {
  CombineArguments arguments = plan.arguments(table);
  size_t views_offset = 0;
  const std::vector<char> tables = tables_of(table, kind, &views_offset);
  const Uploaded uploaded(tables.data(), tables.size(), false);
  const Uploaded word(&failed, sizeof(failed), true);
  const char* begin = uploaded.data();
  if (kind > 0 && tables.size() <= cuda_api()->most_inline_bytes()) {
    arguments.inline_bytes = static_cast<uint32_t>(tables.size());
    begin = tables.data();
  }
  arguments.jobs = reinterpret_cast<decltype(arguments.jobs)>(begin);
  arguments.views = reinterpret_cast<decltype(arguments.views)>(begin + views_offset);
  std::copy(std::begin(buffers), std::end(buffers), arguments.buffers);
  if (has_word) arguments.failed = reinterpret_cast<const uint32_t*>(word.data());
  const std::string fault = fault_of(cuda_api()->launch_combine(arguments, nullptr));
  if (!fault.empty()) return fault;
  if (!uploaded.is_unchanged()) return "the tables in memory are not what they were";
  if (!word.is_unchanged()) return "the failed word is not what it was";
  return "";
}

// Also with small groups of blocks: otherwise only large tensors have several.
CombineTable table_of(const Case& given, const CombinePlan& plan) {
  return plan.table(given.alignment, one_of(4) ? CombinePlan::kGroupBlocks : between(1, 4));
}

std::string describe(const Case& given, const char* what) {
  return std::string(what) + ", in boxes of dtype " +
         std::to_string(static_cast<int>(given.dtype)) + ", alignment " +
         std::to_string(given.alignment);
}

// Launch with the memory of the case, and compare all of it.
std::string launch_near(Case& given, const CombinePlan& plan, const CombineTable& table,
                        size_t kind, bool has_word, uint32_t failed) {
  constexpr int kOutput = static_cast<int>(Buffer::kOutput);
  std::vector<uint64_t> before[kBuffers];
  char* buffers[kBuffers];
  for (int b = 0; b < kBuffers; ++b) {
    before[b] = given.memory[b].words;
    buffers[b] = given.memory[b].data();
    add_live(buffers[b], given.bytes(b), "a tensor");
  }
  const std::vector<char> expected = combine_cases::plainly(given, failed != 0);
  const std::string fault = launch(plan, table, kind, buffers, has_word, failed);
  if (!fault.empty()) return fault;
  if (!combine_cases::are_equal(buffers[kOutput], expected.data(),
                                static_cast<int64_t>(expected.size()), given.dtype)) {
    return describe(given, "cells that are not those of plain loops");
  }
  std::memcpy(reinterpret_cast<char*>(before[kOutput].data()) + given.memory[kOutput].shift,
              buffers[kOutput], expected.size());
  for (int b = 0; b < kBuffers; ++b) {
    if (given.memory[b].words != before[b]) return describe(given, "a stray store");
  }
  return "";
}

// Reserved addresses for cells far apart; only pages that are touched take memory.
class FarMemory {
 public:
  static constexpr int64_t kBytes = (kMostFarRows + 2) * kFarBytes;

  void forget() { madvise(data_, kBytes, MADV_DONTNEED); }
  char* data() { return data_; }

 private:
  char* data_ = reserve(kBytes);
};

CombineBox far_box(CombineBox box, int64_t item_bytes) {
  const bool is_far = !box.shape.empty() && box.shape[0] <= kMostFarRows;
  for (CombineCells& cells : box.views) {
    cells.offset += kFarBytes / item_bytes;
    if (is_far) cells.strides[0] += kFarBytes / item_bytes;
  }
  return box;
}

// The same cells gigabytes away. If the first dim has few rows, these are gigabytes apart as well.
std::string launch_far(Case& given, size_t kind, bool has_word, uint32_t failed) {
  static FarMemory far[kBuffers];
  // Often more rows than a tile has, and few enough to be far apart.
  for (CombineBox& box : given.boxes) {
    if (!box.shape.empty() && !one_of(4)) {
      box.shape[0] = std::min(box.shape[0], between(kMostFarRows / 2 + 1, kMostFarRows));
    }
  }
  char* buffers[kBuffers];
  for (int b = 0; b < kBuffers; ++b) {
    far[b].forget();
    buffers[b] = far[b].data() + given.alignment;
    add_live(far[b].data(), FarMemory::kBytes, "a far tensor");
  }
  const int64_t bytes = item_bytes(given.dtype);
  std::vector<CombineBox> boxes;
  const auto far_cells = [&](size_t i, size_t v) {
    return std::vector<BoxView>{given.view(boxes[i].views[v], boxes[i].shape)};
  };
  const auto far_begin = [&](size_t i, size_t v) {
    const CombineCells& cells = boxes[i].views[v];
    return buffers[static_cast<int>(cells.buffer)] + cells.offset * bytes;
  };
  const auto cells_of = [&](const CombineBox& box, size_t v, const char* begin) {
    const std::vector<BoxView> near{given.view(box.views[v], box.shape)};
    std::vector<char> cells(near[0].bytes());
    BoxStream(&near).gather(begin, cells.data(), cells.size());
    return cells;
  };
  for (const CombineBox& box : given.boxes) {
    boxes.push_back(far_box(box, bytes));
    for (size_t v = 0; v < box.views.size(); ++v) {
      const std::vector<char> cells = cells_of(box, v, given.at(box.views[v]));
      const std::vector<BoxView> there = far_cells(boxes.size() - 1, v);
      BoxStream(&there).scatter(far_begin(boxes.size() - 1, v), cells.data(), cells.size());
    }
  }
  const std::vector<char> expected = combine_cases::plainly(given, failed != 0);
  const CombinePlan plan(given.dtype, combine_cases::kFill, boxes);
  const std::string fault = launch(plan, table_of(given, plan), kind, buffers, has_word, failed);
  if (!fault.empty()) return fault;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const int64_t offset = given.boxes[i].views[0].offset * bytes;
    const std::vector<char> wanted = cells_of(given.boxes[i], 0, expected.data() + offset);
    const std::vector<BoxView> there = far_cells(i, 0);
    std::vector<char> found(wanted.size());
    BoxStream(&there).gather(far_begin(i, 0), found.data(), found.size());
    if (!combine_cases::are_equal(found.data(), wanted.data(), static_cast<int64_t>(wanted.size()),
                                  given.dtype)) {
      return describe(given, "far cells that are not those of plain loops");
    }
  }
  return "";
}

}  // namespace

std::string run_launch(uint64_t seed, uint64_t index) {
  constexpr size_t kKinds = 1 + std::size(kInlineBytes);
  begin_launch(seed, index);
  combine_cases::random_bits.seed(random_bits());
  const size_t dtypes = std::size(combine_cases::kDtypes);
  static_assert(kLaunchClasses == std::size(combine_cases::kDtypes) * kKinds);
  const bool is_large = index >= kFirstLarge || between(0, 99) == 0;
  Case given = combine_cases::random_case(combine_cases::kDtypes[index % dtypes], is_large);
  const size_t kind = index / dtypes % kKinds;
  // The smallest tables have room for only a few boxes.
  if (kind == 1) given.boxes.resize(std::min<size_t>(given.boxes.size(), between(1, 3)));
  const uint32_t failed = between(0, is_large ? 1 : 7) == 0 ? 1u << between(0, 31) : 0;
  const bool has_word = failed != 0 || between(0, 1) == 0;
  if (!is_large && between(0, 7) == 0) return launch_far(given, kind, has_word, failed);
  const bool splits = !is_large && between(0, 11) == 0;
  const int64_t most_bytes = splits ? between(32, 4000) : CombinePlan::kMostBytes;
  const CombinePlan plan(given.dtype, combine_cases::kFill, given.boxes, most_bytes);
  return launch_near(given, plan, table_of(given, plan), kind, has_word, failed);
}

}  // namespace ptx

}  // namespace gpudist
