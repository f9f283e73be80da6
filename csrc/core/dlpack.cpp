#include "core/dlpack.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "core/recycling.h"

namespace gpudist {

namespace {

constexpr int32_t kCpu = 1;
enum Code : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

constexpr size_t kAlignment = 64;

struct TensorInMemory {
  dlpack::ManagedTensorVersioned managed;
  std::shared_ptr<char> memory;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

Code code_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBool: return kBool;
    case Dtype::kUint8: return kUint;
    case Dtype::kInt8:
    case Dtype::kInt16:
    case Dtype::kInt32:
    case Dtype::kInt64: return kInt;
    case Dtype::kFloat16:
    case Dtype::kFloat32:
    case Dtype::kFloat64: return kFloat;
    case Dtype::kBfloat16: return kBfloat;
    case Dtype::kComplex64:
    case Dtype::kComplex128: return kComplex;
  }
  throw std::invalid_argument("not a dtype");
}

int64_t times(int64_t a, int64_t b) {
  int64_t product;
  if (__builtin_mul_overflow(a, b, &product)) throw std::bad_alloc();
  return product;
}

// Strides in items.
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t dim = shape.size(); dim-- > 0;) {
    if (shape[dim] < 0) throw std::invalid_argument("a shape has no negative extents");
    strides[dim] = stride;
    stride = times(stride, shape[dim]);
  }
  return strides;
}

// Number of items of a contiguous tensor. The strides of an empty one may not overflow either.
int64_t items_of(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  return shape.empty() ? 1 : times(shape[0], strides[0]);
}

void release(dlpack::ManagedTensorVersioned* managed) {
  delete static_cast<TensorInMemory*>(managed->manager_ctx);
}

dlpack::ManagedTensorVersioned* make_tensor(std::shared_ptr<char> memory, char* data,
                                            const std::vector<int64_t>& shape,
                                            std::vector<int64_t> strides, Dtype dtype) {
  auto tensor = std::make_unique<TensorInMemory>();
  tensor->memory = std::move(memory);
  tensor->shape = shape;
  tensor->strides = std::move(strides);
  dlpack::ManagedTensorVersioned& managed = tensor->managed;
  managed.version = {1, 0};
  managed.manager_ctx = tensor.get();
  managed.deleter = release;
  managed.flags = 0;
  managed.dl_tensor = {data,
                       {kCpu, 0},
                       static_cast<int32_t>(shape.size()),
                       {code_of(dtype), static_cast<uint8_t>(8 * item_bytes(dtype)), 1},
                       tensor->shape.data(),
                       tensor->strides.data(),
                       0};
  return &tensor.release()->managed;
}

std::shared_ptr<char> recycled(size_t bytes) {
  const auto block = recycling_pool().acquire(bytes);
  return {block->data, [block](char*) { recycling_pool().release(block); }};
}

std::shared_ptr<char> allocated(size_t bytes) {
  const size_t whole = (bytes + kAlignment) / kAlignment * kAlignment;
  void* const data = std::aligned_alloc(kAlignment, whole);
  if (data == nullptr) throw std::bad_alloc();
  return {static_cast<char*>(data), std::free};
}

}  // namespace

dlpack::ManagedTensorVersioned* recycled_tensor(const std::vector<int64_t>& shape, Dtype dtype) {
  std::vector<int64_t> strides = contiguous_strides(shape);
  auto memory = recycled(static_cast<size_t>(times(items_of(shape, strides), item_bytes(dtype))));
  char* const data = memory.get();
  return make_tensor(std::move(memory), data, shape, std::move(strides), dtype);
}

SharedMemory::SharedMemory(size_t bytes, bool recycles)
    : data(recycles ? recycled(bytes) : allocated(bytes)), bytes(bytes) {}

dlpack::ManagedTensorVersioned* tensor_in(const SharedMemory& memory, size_t offset,
                                          const std::vector<int64_t>& shape, Dtype dtype) {
  std::vector<int64_t> strides = contiguous_strides(shape);
  const auto bytes = static_cast<size_t>(times(items_of(shape, strides), item_bytes(dtype)));
  if (offset > memory.bytes || bytes > memory.bytes - offset) {
    throw std::invalid_argument("a tensor reaches beyond its memory");
  }
  return make_tensor(memory.data, memory.data.get() + offset, shape, std::move(strides), dtype);
}

}  // namespace gpudist
