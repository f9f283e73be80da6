// Gather, scatter and scatter-add of boxes as byte streams, which can be interrupted between any
// two items.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/box.h"

namespace gpudist {

enum class Dtype : int {
  kBool,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
};

int64_t item_bytes(Dtype dtype);

// 16-bit floats are summed in float32 and rounded once.
inline bool is_narrow(Dtype dtype) {
  return dtype == Dtype::kFloat16 || dtype == Dtype::kBfloat16;
}
inline Dtype sum_dtype(Dtype dtype) {
  return is_narrow(dtype) ? Dtype::kFloat32 : dtype;
}

// Measured on two cores with 32 MiB of cache: from this size on, a result is written past it.
constexpr int64_t kPastCacheBytes = 8 << 20;

// Iterates over the bytes of boxes in order. It holds offsets only; the tensor's address is an
// argument.
class BoxStream {
 public:
  BoxStream() = default;
  explicit BoxStream(const std::vector<BoxView>* boxes) : boxes_(boxes) { enter(); }

  bool done() const { return boxes_ == nullptr || box_ == boxes_->size(); }

  // Contiguous bytes of the tensor.
  struct Run {
    int64_t offset;
    int64_t bytes;
  };

  // Skip and return the next contiguous bytes, at most `bytes`.
  Run take(int64_t bytes);

  // Copy the next `bytes` of the tensor at `tensor` to `out`.
  void gather(const char* tensor, char* out, size_t bytes);

  // Copy `bytes` from `in` to the next cells of the tensor. If `past_cache`, long rows are written
  // to memory directly, which is faster if the result does not fit into the cache.
  void scatter(char* tensor, const char* in, size_t bytes, bool past_cache = false);

  // Call f(offset in the tensor, bytes) for contiguous pieces that make up the next `bytes`.
  template <class F>
  void walk(int64_t bytes, F f) {
    while (bytes > 0) {
      const Run piece = take(bytes);
      f(piece.offset, static_cast<size_t>(piece.bytes));
      bytes -= piece.bytes;
    }
  }

  // Set the next cells to the sums of items of `in` and of the next cells of `other`, all of
  // `dtype`.
  void scatter_sum(char* tensor, const char* other, BoxStream& others, const char* in, size_t bytes,
                   Dtype dtype);

  // Add items of `dtype` to the next cells. The cells, and the boxes that describe them, are of
  // sum_dtype(dtype).
  void scatter_add(char* tensor, const char* in, size_t bytes, Dtype dtype);

 private:
  void enter();

  const std::vector<BoxView>* boxes_ = nullptr;
  size_t box_ = 0;
  RowCursor row_;
  int64_t in_row_ = 0;
};

// Copy boxes of one tensor to boxes of another that have the same shapes in the same order.
void copy_boxes(const char* source, const std::vector<BoxView>& from, char* destination,
                const std::vector<BoxView>& to);

// Copy the next `bytes` of one stream to the cells of another, like scatter.
void copy_cells(const char* source, BoxStream& from, char* destination, BoxStream& to,
                int64_t bytes, bool past_cache);

// The same, but add, like scatter_add.
void add_cells(const char* source, BoxStream& from, char* destination, BoxStream& to, int64_t bytes,
               Dtype dtype);

// Set all cells of a box to `value`.
void fill(char* destination, const BoxView& box, Dtype dtype, double value);

// Round float32 sums to a 16-bit dtype, and the reverse.
void narrow(const float* sums, char* destination, int64_t items, Dtype dtype);
void widen(const char* source, float* sums, int64_t items, Dtype dtype);

}  // namespace gpudist
