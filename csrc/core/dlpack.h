// How torch describes a tensor to the core, which does not link to torch: declarations of DLPack's
// C exchange API, copied from dlpack.h of DLPack 1.2.
#pragma once

#include <cstdint>

namespace gpudist::dlpack {

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

// Functions of the library that owns a type of tensors, of which only the last but one is used: it
// describes the tensor `object`, whose type must be that one, without owning it.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocate;
  void* export_owned;
  void* import_owned;
  int (*describe)(void* object, Tensor* description);
  void* current_stream;
};

constexpr const char* kExchangeCapsuleName = "dlpack_exchange_api";

}  // namespace gpudist::dlpack
