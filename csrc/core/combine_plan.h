// What one launch of the kernel does, and its tables for every alignment of the buffers.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "core/combine.h"

namespace gpudist {

// Cells of a buffer, in items.
struct CombineCells {
  Buffer buffer;
  int64_t offset;                // of the first
  std::vector<int64_t> strides;  // between neighbours in each dim of the job
};

// Cells that become the ordered sum of others. No two destinations of a plan overlap, and none is
// read for another.
struct CombineBox {
  std::vector<int64_t> shape;
  std::vector<CombineCells> views;  // the destination, then the summands
  bool already_there = false;       // the cells have their values; there are no summands
};

// What the kernel reads, but for addresses.
struct CombineTable {
  std::vector<CombineJob> jobs;
  std::vector<CombineView> views;
  uint32_t blocks = 0;
};

class CombinePlan {
 public:
  // So that 32 bits count the bytes of four rows.
  static constexpr int64_t kMostBytes = int64_t{1} << 29;

  CombinePlan() = default;
  // `fill`: value of cells without a summand. Jobs of more than `most_bytes`, at least 32, are
  // split.
  CombinePlan(Dtype dtype, double fill, const std::vector<CombineBox>& boxes,
              int64_t most_bytes = kMostBytes);

  // There is no cell to write.
  bool is_empty() const { return boxes_.empty(); }

  // For buffers whose addresses are multiples of `alignment`: 1, 2, 4, 8 or 16.
  CombineTable table(int alignment) const;

  // Everything but the buffers and the failed word. They point into the table.
  CombineArguments arguments(const CombineTable& table) const;

 private:
  // A box as rows of bytes that are contiguous in every view. Dims are merged where they continue
  // each other in all views.
  struct Rows {
    int summands;
    int64_t row_bytes;
    int64_t line_bytes;               // of all rows in the last dim
    std::vector<int64_t> shape;       // of the dims that count rows
    std::vector<CombineCells> views;  // in bytes

    int64_t bytes() const;
  };

  static Rows rows_of(const CombineBox& box, int64_t item_bytes);
  static std::array<Rows, 2> halves(const Rows& rows);
  static Rows cut(Rows rows);
  // Bytes, up to 16, of which all addresses, strides and extents are multiples.
  int64_t unit_of(const Rows& rows, int alignment) const;
  void append(const Rows& rows, int alignment, int64_t tile_rows, CombineTable& table) const;

  Dtype dtype_ = Dtype::kUint8;
  Dtype real_dtype_ = Dtype::kUint8;
  double fill_ = 0;
  int64_t most_bytes_ = kMostBytes;
  std::vector<Rows> boxes_;
};

}  // namespace gpudist
