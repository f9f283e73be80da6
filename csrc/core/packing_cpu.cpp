#include <algorithm>
#include <complex>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "core/errors.h"
#include "core/half.h"
#include "core/packing.h"

namespace gpudist {

int64_t item_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool:
    case Dtype::kUint8:
    case Dtype::kInt8: return 1;
    case Dtype::kInt16:
    case Dtype::kFloat16:
    case Dtype::kBfloat16: return 2;
    case Dtype::kInt32:
    case Dtype::kFloat32: return 4;
    case Dtype::kInt64:
    case Dtype::kFloat64:
    case Dtype::kComplex64: return 8;
    case Dtype::kComplex128: return 16;
  }
  throw TransportError("unknown dtype");
}

namespace {

template <class T>
[[gnu::always_inline]] inline void add_loop(char* cells, const char* a, const char* b,
                                            size_t bytes) {
  T* sum = reinterpret_cast<T*>(cells);
  // Chunks begin at multiples of 16 bytes, so that items are aligned.
  const T* x = reinterpret_cast<const T*>(a);
  const T* y = reinterpret_cast<const T*>(b);
  const size_t count = bytes / sizeof(T);
  for (size_t i = 0; i < count; ++i) sum[i] = x[i] + y[i];
}

#if defined(__x86_64__)
const bool has_avx2 = __builtin_cpu_supports("avx2");

// The same loop compiled for registers twice as wide.
template <class T>
[[gnu::target("avx2")]] void add_loop_avx2(char* cells, const char* a, const char* b,
                                           size_t bytes) {
  add_loop<T>(cells, a, b, bytes);
}
#endif

template <class T>
void sum_items(char* cells, const char* a, const char* b, size_t bytes) {
#if defined(__x86_64__)
  if (has_avx2) return add_loop_avx2<T>(cells, a, b, bytes);
#endif
  add_loop<T>(cells, a, b, bytes);
}

void sum_run(char* cells, const char* a, const char* b, size_t bytes, Dtype dtype) {
  switch (dtype) {
    // Sums of integers wrap; C++ defines that for unsigned types only.
    case Dtype::kUint8:
    case Dtype::kInt8: return sum_items<uint8_t>(cells, a, b, bytes);
    case Dtype::kInt16: return sum_items<uint16_t>(cells, a, b, bytes);
    case Dtype::kInt32: return sum_items<uint32_t>(cells, a, b, bytes);
    case Dtype::kInt64: return sum_items<uint64_t>(cells, a, b, bytes);
    case Dtype::kFloat32:
    case Dtype::kComplex64: return sum_items<float>(cells, a, b, bytes);
    case Dtype::kFloat64:
    case Dtype::kComplex128: return sum_items<double>(cells, a, b, bytes);
    case Dtype::kFloat16:
    case Dtype::kBfloat16:
    case Dtype::kBool: break;
  }
  throw TransportError("bool has no sum, and 16-bit floats are only summed in float32");
}

template <float (*widen)(uint16_t)>
void add_narrow(char* cells, const char* in, size_t bytes) {
  float* sum = reinterpret_cast<float*>(cells);
  const uint16_t* item = reinterpret_cast<const uint16_t*>(in);
  const size_t count = bytes / sizeof(uint16_t);
  for (size_t i = 0; i < count; ++i) sum[i] += widen(item[i]);
}

// `bytes` counts bytes of `in`.
void add_run(char* cells, const char* in, size_t bytes, Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat16: return add_narrow<float16_to_float>(cells, in, bytes);
    case Dtype::kBfloat16: return add_narrow<bfloat16_to_float>(cells, in, bytes);
    default: return sum_run(cells, cells, in, bytes, dtype);
  }
}

// With a size known at compile time a copy is one or two moves instead of a call of memcpy.
inline void copy_run(char* to, const char* from, size_t bytes) {
  switch (bytes) {
    case 1: *to = *from; return;
    case 2: std::memcpy(to, from, 2); return;
    case 4: std::memcpy(to, from, 4); return;
    case 8: std::memcpy(to, from, 8); return;
    case 16: std::memcpy(to, from, 16); return;
    default: std::memcpy(to, from, bytes);
  }
}

constexpr size_t kLongRunBytes = 4 * 1024;

#if defined(__x86_64__)
// Copy to memory that is not loaded into the cache first, nor kept there.
[[gnu::target("avx2")]] void stream_avx2(char* to, const char* from, size_t bytes) {
  const size_t before = -reinterpret_cast<uintptr_t>(to) % sizeof(__m256i);
  std::memcpy(to, from, before);
  size_t at = before;
  for (; at + 4 * sizeof(__m256i) <= bytes; at += 4 * sizeof(__m256i)) {
    const __m256i* in = reinterpret_cast<const __m256i*>(from + at);
    __m256i* out = reinterpret_cast<__m256i*>(to + at);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
    _mm256_stream_si256(out, a);
    _mm256_stream_si256(out + 1, b);
    _mm256_stream_si256(out + 2, c);
    _mm256_stream_si256(out + 3, d);
  }
  _mm_sfence();
  std::memcpy(to + at, from + at, bytes - at);
}
#endif

void copy_past_cache(char* to, const char* from, size_t bytes) {
#if defined(__x86_64__)
  if (has_avx2 && bytes >= kLongRunBytes) return stream_avx2(to, from, bytes);
#endif
  copy_run(to, from, bytes);
}

}  // namespace

void BoxStream::enter() {
  while (!done() && (*boxes_)[box_].rows == 0) ++box_;
  if (!done()) row_ = RowCursor((*boxes_)[box_]);
}

BoxStream::Run BoxStream::take(int64_t bytes) {
  if (done()) throw TransportError("a message is longer than its boxes");
  const int64_t row_bytes = (*boxes_)[box_].row_bytes;
  const Run piece{row_.offset() + in_row_, std::min(bytes, row_bytes - in_row_)};
  in_row_ += piece.bytes;
  if (in_row_ == row_bytes) {
    in_row_ = 0;
    row_.next();
    if (row_.done()) {
      ++box_;
      enter();
    }
  }
  return piece;
}

void BoxStream::gather(const char* tensor, char* out, size_t bytes) {
  walk(static_cast<int64_t>(bytes), [&](int64_t offset, size_t piece) {
    copy_run(out, tensor + offset, piece);
    out += piece;
  });
}

void BoxStream::scatter(char* tensor, const char* in, size_t bytes, bool past_cache) {
  walk(static_cast<int64_t>(bytes), [&](int64_t offset, size_t piece) {
    past_cache ? copy_past_cache(tensor + offset, in, piece) : copy_run(tensor + offset, in, piece);
    in += piece;
  });
}

void BoxStream::scatter_sum(char* tensor, const char* other, BoxStream& others, const char* in,
                            size_t bytes, Dtype dtype) {
  walk(static_cast<int64_t>(bytes), [&](int64_t offset, size_t piece) {
    for (size_t done = 0; done < piece;) {
      const Run own = others.take(static_cast<int64_t>(piece - done));
      sum_run(tensor + offset + done, other + own.offset, in, own.bytes, dtype);
      in += own.bytes;
      done += own.bytes;
    }
  });
}

void BoxStream::scatter_add(char* tensor, const char* in, size_t bytes, Dtype dtype) {
  const size_t widening = item_bytes(sum_dtype(dtype)) / item_bytes(dtype);
  walk(static_cast<int64_t>(bytes * widening), [&](int64_t offset, size_t piece) {
    add_run(tensor + offset, in, piece / widening, dtype);
    in += piece / widening;
  });
}

void copy_boxes(const char* source, const std::vector<BoxView>& from, char* destination,
                const std::vector<BoxView>& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    const BoxView& a = from[i];
    const BoxView& b = to[i];
    if (a.row_bytes == b.row_bytes) {
      RowCursor in(a);
      for (RowCursor out(b); !out.done(); out.next(), in.next()) {
        copy_run(destination + out.offset(), source + in.offset(), a.row_bytes);
      }
    } else if (a.row_bytes < b.row_bytes) {
      // Rows differ in length if one side is contiguous in more dims: iterate over the shorter
      // rows.
      const std::vector<BoxView> longer{b};
      BoxStream out(&longer);
      for (RowCursor in(a); !in.done(); in.next()) {
        out.scatter(destination, source + in.offset(), a.row_bytes);
      }
    } else {
      const std::vector<BoxView> longer{a};
      BoxStream in(&longer);
      for (RowCursor out(b); !out.done(); out.next()) {
        in.gather(source, destination + out.offset(), b.row_bytes);
      }
    }
  }
}

void copy_cells(const char* source, BoxStream& from, char* destination, BoxStream& to,
                int64_t bytes, bool past_cache) {
  from.walk(bytes, [&](int64_t offset, size_t piece) {
    to.scatter(destination, source + offset, piece, past_cache);
  });
}

void add_cells(const char* source, BoxStream& from, char* destination, BoxStream& to, int64_t bytes,
               Dtype dtype) {
  from.walk(bytes, [&](int64_t offset, size_t piece) {
    to.scatter_add(destination, source + offset, piece, dtype);
  });
}

namespace {

template <class T>
void fill_items(char* destination, int64_t items, T value) {
  std::fill_n(reinterpret_cast<T*>(destination), items, value);
}

void fill_row(char* row, int64_t items, Dtype dtype, double value) {
  switch (dtype) {
    case Dtype::kBool: return fill_items<uint8_t>(row, items, value != 0);
    case Dtype::kUint8: return fill_items(row, items, static_cast<uint8_t>(value));
    case Dtype::kInt8: return fill_items(row, items, static_cast<int8_t>(value));
    case Dtype::kInt16: return fill_items(row, items, static_cast<int16_t>(value));
    case Dtype::kInt32: return fill_items(row, items, static_cast<int32_t>(value));
    case Dtype::kInt64: return fill_items(row, items, static_cast<int64_t>(value));
    case Dtype::kFloat16:
      return fill_items(row, items, float_to_float16(static_cast<float>(value)));
    case Dtype::kBfloat16:
      return fill_items(row, items, float_to_bfloat16(static_cast<float>(value)));
    case Dtype::kFloat32: return fill_items(row, items, static_cast<float>(value));
    case Dtype::kFloat64: return fill_items(row, items, value);
    case Dtype::kComplex64:
      return fill_items(row, items, std::complex<float>(static_cast<float>(value)));
    case Dtype::kComplex128: return fill_items(row, items, std::complex<double>(value));
  }
}

}  // namespace

void fill(char* destination, const BoxView& box, Dtype dtype, double value) {
  const int64_t item = item_bytes(dtype);
  alignas(16) char cells[16];  // as many items as fit
  fill_row(cells, static_cast<int64_t>(sizeof(cells)) / item, dtype, value);
  for (RowCursor row(box); !row.done(); row.next()) {
    char* const to = destination + row.offset();
    if (box.row_bytes <= static_cast<int64_t>(sizeof(cells))) {
      copy_run(to, cells, box.row_bytes);
    } else if (value == 0) {
      std::memset(to, 0, box.row_bytes);
    } else {
      fill_row(to, box.row_bytes / item, dtype, value);
    }
  }
}

void narrow(const float* sums, char* destination, int64_t items, Dtype dtype) {
  uint16_t* out = reinterpret_cast<uint16_t*>(destination);
  const bool is_half = dtype == Dtype::kFloat16;
  for (int64_t i = 0; i < items; ++i) {
    out[i] = is_half ? float_to_float16(sums[i]) : float_to_bfloat16(sums[i]);
  }
}

void widen(const char* source, float* sums, int64_t items, Dtype dtype) {
  const uint16_t* in = reinterpret_cast<const uint16_t*>(source);
  const bool is_half = dtype == Dtype::kFloat16;
  for (int64_t i = 0; i < items; ++i) {
    sums[i] = is_half ? float16_to_float(in[i]) : bfloat16_to_float(in[i]);
  }
}

}  // namespace gpudist
