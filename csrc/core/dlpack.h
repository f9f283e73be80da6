// Recycled memory as DLPack tensors, which torch imports; the core does not link to torch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "core/packing.h"

namespace gpudist {

// Declarations copied from dlpack.h of DLPack 1.0.
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

// Functions of the library that owns a type of tensors (DLPack 1.2), of which only the last but one
// is used: it describes the tensor `object`, whose type must be that one, without owning it.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*describe)(void* object, Tensor* description);
  void* current_stream;
};

constexpr const char* kCapsuleName = "dltensor_versioned";
constexpr const char* kExchangeCapsuleName = "dlpack_exchange_api";
constexpr int32_t kCpuDevice = 1;
constexpr int32_t kCudaDevice = 2;

}  // namespace dlpack

// Return a contiguous tensor of undefined content. Its deleter returns the memory to the process's
// pool and may be called from any thread. Throws std::invalid_argument, std::bad_alloc.
dlpack::ManagedTensorVersioned* recycled_tensor(const std::vector<int64_t>& shape, Dtype dtype);

// Memory of undefined content that several tensors share, aligned to 64 bytes. With `recycles` it
// is taken from the process's pool and returned when the last tensor is gone. Throws
// std::bad_alloc.
struct SharedMemory {
  SharedMemory(size_t bytes, bool recycles);

  std::shared_ptr<char> data;
  size_t bytes;
};

// Return a contiguous tensor in that memory. Throws std::invalid_argument if it does not fit.
dlpack::ManagedTensorVersioned* tensor_in(const SharedMemory& memory, size_t offset,
                                          const std::vector<int64_t>& shape, Dtype dtype);

}  // namespace gpudist
