// Plan of one launch of the combine kernel, and its tables for every alignment of the buffers.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/combine.h"

namespace gpudist {

// Cells in a buffer, in items.
struct CombineCells {
  Buffer buffer;
  int64_t offset;                // of the first cell
  std::vector<int64_t> strides;  // for each dim of the job
};

// One box of cells to set to an ordered sum of others. Destinations of a plan do not overlap, and
// no destination is read as a summand.
struct CombineBox {
  std::vector<int64_t> shape;
  std::vector<CombineCells> views;  // the destination, then the summands
  bool already_there = false;       // the cells have their values; there are no summands
};

// Tables of the kernel, which do not depend on the addresses of the buffers.
struct CombineTable {
  std::vector<CombineJob> jobs;
  std::vector<CombineView> views;
  uint32_t blocks = 0;
  uint32_t grouped_jobs = 0;
  uint32_t grouped_blocks = 0;
  Divisor group;
};

class CombinePlan {
 public:
  // Largest job: the bytes of four rows fit in 32 bits.
  static constexpr int64_t kMostBytes = int64_t{1} << 29;
  // Blocks of the largest job in a group, which write 2 MiB.
  static constexpr uint32_t kGroupBlocks = 128;

  CombinePlan() = default;
  // `fill`: value of cells without a summand. Jobs larger than `most_bytes`, which is at least 32,
  // are split.
  CombinePlan(Dtype dtype, double fill, const std::vector<CombineBox>& boxes,
              int64_t most_bytes = kMostBytes);

  bool is_empty() const { return boxes_.empty(); }

  // Tables for buffers whose addresses are multiples of `alignment`: 1, 2, 4, 8 or 16.
  CombineTable table(int alignment, uint32_t group_blocks = kGroupBlocks) const;

  // Arguments of the kernel, without the buffers and the failed word. They point into `table`.
  CombineArguments arguments(const CombineTable& table) const;

 private:
  // A box as rows of bytes that are contiguous in every view. Dims are merged where they are
  // contiguous in all views.
  struct Rows {
    int summands;
    int64_t row_bytes;
    int64_t line_bytes;               // of all rows in the last dim
    std::vector<int64_t> shape;       // extents of the dims that index rows
    std::vector<CombineCells> views;  // in bytes

    int64_t bytes() const;
  };

  static Rows rows_of(const CombineBox& box, int64_t item_bytes);
  static std::array<Rows, 2> halves(const Rows& rows);
  static Rows cut(Rows rows);
  // Largest power of two, at most 16, that divides all addresses, strides and extents in bytes.
  int64_t unit_of(const Rows& rows, int alignment) const;
  void append(const Rows& rows, int alignment, CombineTable& table) const;
  static void place_blocks(CombineTable& table, uint32_t group_blocks);

  Dtype dtype_ = Dtype::kUint8;
  Dtype real_dtype_ = Dtype::kUint8;
  double fill_ = 0;
  int64_t most_bytes_ = kMostBytes;
  std::vector<Rows> boxes_;
};

}  // namespace gpudist
