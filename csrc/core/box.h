// Boxes of strided tensors, and the index arithmetic to walk them. Host and device compilers share
// this.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define GPUDIST_HOST_DEVICE __host__ __device__
#else
#define GPUDIST_HOST_DEVICE
#endif

// Put before loops whose unrolling would use too many registers to keep half of a multiprocessor's
// threads resident.
#ifdef __CUDA_ARCH__
#define GPUDIST_NOT_UNROLLED _Pragma("unroll 1")
#else
#define GPUDIST_NOT_UNROLLED
#endif

namespace gpudist {

constexpr int kMaxDims = 8;

// A box of a tensor as rows of `row_bytes` contiguous bytes; `shape` and `stride` index the rows.
struct BoxView {
  int dims = 0;
  int64_t offset = 0;     // offset of the first byte from the start of the tensor
  int64_t row_bytes = 0;  // contiguous bytes in a row
  int64_t rows = 0;
  int64_t shape[kMaxDims] = {};   // extents of the dims that index rows, outermost first
  int64_t stride[kMaxDims] = {};  // in bytes

  GPUDIST_HOST_DEVICE int64_t bytes() const { return rows * row_bytes; }

  // Offset of row number `row`.
  GPUDIST_HOST_DEVICE int64_t row_offset(int64_t row) const {
    int64_t position = offset;
    for (int d = dims - 1; d >= 0; --d) {
      position += (row % shape[d]) * stride[d];
      row /= shape[d];
    }
    return position;
  }
};

// Walks the rows of a box in order, by additions only.
class RowCursor {
 public:
  RowCursor() = default;
  explicit RowCursor(const BoxView& box) : box_(&box), offset_(box.offset) {}

  int64_t offset() const { return offset_; }
  bool done() const { return row_ == box_->rows; }

  void next() {
    ++row_;
    for (int d = box_->dims - 1; d >= 0; --d) {
      offset_ += box_->stride[d];
      if (++index_[d] < box_->shape[d]) return;
      offset_ -= box_->shape[d] * box_->stride[d];
      index_[d] = 0;
    }
  }

 private:
  const BoxView* box_ = nullptr;
  int64_t offset_ = 0;
  int64_t row_ = 0;
  int64_t index_[kMaxDims] = {};
};

// The box [start, stop) of a tensor whose strides are in items; dims that continue each other are
// merged.
inline BoxView make_box_view(int dims, const int64_t* start, const int64_t* stop,
                             const int64_t* strides, int64_t item_bytes) {
  BoxView view;
  view.row_bytes = item_bytes;
  view.rows = 1;
  for (int d = 0; d < dims; ++d) {
    const int64_t extent = stop[d] - start[d];
    view.offset += start[d] * strides[d] * item_bytes;
    view.rows *= extent > 0 ? extent : 0;
    if (extent == 1) continue;
    const int64_t stride = strides[d] * item_bytes;
    const int last = view.dims - 1;
    if (last >= 0 && view.stride[last] == extent * stride) {
      view.shape[last] *= extent;
      view.stride[last] = stride;
    } else {
      view.shape[view.dims] = extent;
      view.stride[view.dims] = stride;
      ++view.dims;
    }
  }
  if (view.rows == 0) {
    view.dims = 0;
    return view;
  }
  if (view.dims > 0 && view.stride[view.dims - 1] == item_bytes) {
    --view.dims;
    view.row_bytes *= view.shape[view.dims];
    view.rows /= view.shape[view.dims];
  }
  return view;
}

}  // namespace gpudist
