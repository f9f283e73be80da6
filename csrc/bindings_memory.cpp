// Python bindings of recycled memory: tensors as DLPack capsules, which torch imports.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <tuple>

#include "bindings.h"
#include "core/packing.h"
#include "core/recycling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gpudist {

namespace {

constexpr size_t kAlignment = 64;

using Memory = std::shared_ptr<char>;
using Shape = std::vector<int64_t>;

// Memory of undefined content that several tensors share.
struct SharedMemory {
  Memory data;
  size_t bytes;
};

Memory recycled(size_t bytes) {
  const auto block = recycling_pool().acquire(bytes);
  return {block->data, [block](char*) { recycling_pool().release(block); }};
}

Memory allocated(size_t bytes) {
  const size_t whole = (bytes + kAlignment) / kAlignment * kAlignment;
  void* const data = std::aligned_alloc(kAlignment, whole);
  if (data == nullptr) throw std::bad_alloc();
  return {static_cast<char*>(data), std::free};
}

nb::dlpack::dtype dlpack_dtype(Dtype dtype) {
  using Code = nb::dlpack::dtype_code;
  const auto code = [dtype] {
    switch (dtype) {
      case Dtype::kBool: return Code::Bool;
      case Dtype::kUint8: return Code::UInt;
      case Dtype::kInt8:
      case Dtype::kInt16:
      case Dtype::kInt32:
      case Dtype::kInt64: return Code::Int;
      case Dtype::kFloat16:
      case Dtype::kFloat32:
      case Dtype::kFloat64: return Code::Float;
      case Dtype::kBfloat16: return Code::Bfloat;
      case Dtype::kComplex64:
      case Dtype::kComplex128: return Code::Complex;
    }
    throw std::invalid_argument("not a dtype");
  };
  return {static_cast<uint8_t>(code()), static_cast<uint8_t>(8 * item_bytes(dtype)), 1};
}

// Bytes of a contiguous tensor. The strides of an empty one may not overflow either.
size_t bytes_of(const Shape& shape, Dtype dtype) {
  int64_t bytes = item_bytes(dtype);
  bool is_empty = false;
  for (const int64_t extent : shape) {
    if (extent < 0) throw std::invalid_argument("a shape has no negative extents");
    is_empty |= extent == 0;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(extent, 1), &bytes)) throw std::bad_alloc();
  }
  return is_empty ? 0 : static_cast<size_t>(bytes);
}

// Return a contiguous tensor at `data`, which shares `memory`.
nb::ndarray<> tensor_at(char* data, const Memory& memory, const Shape& shape, Dtype dtype) {
  const std::vector<size_t> extents(shape.begin(), shape.end());
  const nb::capsule owner(new Memory(memory),
                          [](void* it) noexcept { delete static_cast<Memory*>(it); });
  return {data, extents.size(), extents.data(), owner, nullptr, dlpack_dtype(dtype)};
}

nb::ndarray<> recycled_tensor(const Shape& shape, Dtype dtype) {
  const Memory memory = recycled(bytes_of(shape, dtype));
  return tensor_at(memory.get(), memory, shape, dtype);
}

std::vector<nb::ndarray<>> tensors_in(const SharedMemory& memory, const std::vector<Dtype>& dtypes,
                                      const std::vector<Shape>& shapes,
                                      const std::vector<size_t>& offsets) {
  if (shapes.size() != dtypes.size() || offsets.size() != dtypes.size()) {
    throw std::invalid_argument("every tensor has a dtype, a shape and an offset");
  }
  std::vector<nb::ndarray<>> tensors;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const size_t bytes = bytes_of(shapes[i], dtypes[i]);
    if (offsets[i] > memory.bytes || bytes > memory.bytes - offsets[i]) {
      throw std::invalid_argument("a tensor reaches beyond its memory");
    }
    tensors.push_back(tensor_at(memory.data.get() + offsets[i], memory.data, shapes[i], dtypes[i]));
  }
  return tensors;
}

}  // namespace

void bind_memory(nb::module_& m) {
  // Create the pool now: if another thread were creating it during fork(), the child would have
  // none.
  recycling_pool();
  m.def("recycled_tensor", recycled_tensor, "shape"_a, "dtype"_a,
        "A DLPack capsule of a contiguous tensor in recycled memory.");
  nb::class_<SharedMemory>(m, "SharedMemory", "Memory that several tensors share.")
      .def(
          "__init__",
          [](SharedMemory* self, size_t bytes, bool recycles) {
            new (self) SharedMemory{recycles ? recycled(bytes) : allocated(bytes), bytes};
          },
          "bytes"_a, "recycles"_a)
      .def("tensors", tensors_in, "dtypes"_a, "shapes"_a, "offsets"_a,
           "DLPack capsules of contiguous tensors in it.");
  m.def(
      "empty_recycling_pool", [] { recycling_pool().empty(); },
      nb::call_guard<nb::gil_scoped_release>(), "Return idle memory to the system.");
  m.def(
      "set_recycling_limit", [](size_t bytes) { recycling_pool().set_limit(bytes); }, "bytes"_a,
      nb::call_guard<nb::gil_scoped_release>(), "Limit the idle memory.");
  m.def(
      "recycling_statistics",
      [] {
        const auto now = recycling_pool().statistics();
        return std::make_tuple(now.in_use_bytes, now.idle_bytes, now.hits, now.misses,
                               now.limit_bytes);
      },
      "Return bytes in use, idle bytes, hits, misses and the limit of idle bytes.");
}

}  // namespace gpudist
