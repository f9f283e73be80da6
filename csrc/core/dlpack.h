// Recycled memory as tensors of DLPack, which is how torch takes it without being linked.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/packing.h"

namespace gpudist {

// As dlpack.h of DLPack 1.0 declares them.
namespace dlpack {

struct Version {
  uint32_t major;
  uint32_t minor;
};

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned* self);
  uint64_t flags;
  Tensor dl_tensor;
};

constexpr const char* kCapsuleName = "dltensor_versioned";

}  // namespace dlpack

// A contiguous tensor of undefined content. Its deleter, which any thread may call at any time,
// gives the memory back to the process's pool. Throws std::invalid_argument, std::bad_alloc.
dlpack::ManagedTensorVersioned* recycled_tensor(const std::vector<int64_t>& shape, Dtype dtype);

// Memory that several tensors share, of undefined content and aligned to 64 bytes; `recycles`: from
// the process's pool, and back to it with the last of them. Throws std::bad_alloc.
struct SharedMemory {
  SharedMemory(size_t bytes, bool recycles);

  std::shared_ptr<char> data;
  size_t bytes;
};

// A contiguous tensor in that memory. Throws std::invalid_argument unless it lies there.
dlpack::ManagedTensorVersioned* tensor_in(const SharedMemory& memory, size_t offset,
                                          const std::vector<int64_t>& shape, Dtype dtype);

}  // namespace gpudist
