#include "dlpack.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "recycling.h"

namespace gpudist {

namespace {

constexpr int32_t kCpu = 1;
enum Code : uint8_t { kInt = 0, kUint = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct RecycledTensor {
  dlpack::ManagedTensorVersioned managed;
  RecyclingPool::Handle block;
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

// In items.
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

void release(dlpack::ManagedTensorVersioned* managed) {
  const std::unique_ptr<RecycledTensor> tensor(static_cast<RecycledTensor*>(managed->manager_ctx));
  recycling_pool().release(tensor->block);
}

}  // namespace

dlpack::ManagedTensorVersioned* recycled_tensor(const std::vector<int64_t>& shape, Dtype dtype) {
  const int64_t item = item_bytes(dtype);
  auto tensor = std::make_unique<RecycledTensor>();
  tensor->shape = shape;
  tensor->strides = contiguous_strides(shape);
  const int64_t items = shape.empty() ? 1 : times(shape[0], tensor->strides[0]);
  tensor->block = recycling_pool().acquire(static_cast<size_t>(times(items, item)));
  dlpack::ManagedTensorVersioned& managed = tensor->managed;
  managed.version = {1, 0};
  managed.manager_ctx = tensor.get();
  managed.deleter = release;
  managed.flags = 0;
  managed.dl_tensor = {tensor->block->data,
                       {kCpu, 0},
                       static_cast<int32_t>(shape.size()),
                       {code_of(dtype), static_cast<uint8_t>(8 * item), 1},
                       tensor->shape.data(),
                       tensor->strides.data(),
                       0};
  return &tensor.release()->managed;
}

}  // namespace gpudist
