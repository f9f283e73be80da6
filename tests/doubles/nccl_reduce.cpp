#include "nccl_reduce.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/half.h"
#include "nccl/nccl_abi.h"

namespace gpudist::doubles {

namespace {

constexpr int kUint32 = 3;
constexpr int kUint64 = 5;

template <class T>
T apply(T a, T b, int op) {
  switch (op) {
    case kNcclMax: return a > b ? a : b;
    case kNcclMin: return a < b ? a : b;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    // Unsigned and at least 32 bits wide, because signed overflow is undefined.
    using Wide = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
    const Wide x = static_cast<Wide>(a), y = static_cast<Wide>(b);
    return static_cast<T>(op == kNcclSum ? x + y : x * y);
  } else {
    return op == kNcclSum ? a + b : a * b;
  }
}

// Load and Store convert between items in memory and the type used for arithmetic.
template <class Item, class Load, class Store>
void reduce_items(const std::vector<const char*>& parts, char* out, size_t items, int op, Load load,
                  Store store) {
  const auto item = [&](size_t part, size_t i) {
    Item value;
    memcpy(&value, parts[part] + i * sizeof(Item), sizeof(Item));
    return load(value);
  };
  for (size_t i = 0; i < items; ++i) {
    auto result = item(0, i);
    for (size_t part = 1; part < parts.size(); ++part) result = apply(result, item(part, i), op);
    const Item rounded = store(result);
    memcpy(out + i * sizeof(Item), &rounded, sizeof(Item));
  }
}

template <class Item>
void reduce_plain(const std::vector<const char*>& parts, char* out, size_t items, int op) {
  const auto same = [](Item value) { return value; };
  reduce_items<Item>(parts, out, items, op, same, same);
}

}  // namespace

size_t dtype_bytes(int dtype) {
  switch (dtype) {
    case kNcclInt8:
    case kNcclUint8: return 1;
    case kNcclFloat16:
    case kNcclBfloat16: return 2;
    case kNcclInt32:
    case kUint32:
    case kNcclFloat32: return 4;
    case kNcclInt64:
    case kUint64:
    case kNcclFloat64: return 8;
    default: return 0;
  }
}

const char* dtype_name(int dtype) {
  constexpr const char* kNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                    "uint64", "float16", "float32", "float64", "bfloat16"};
  return dtype >= 0 && dtype < 10 ? kNames[dtype] : "-";
}

const char* op_name(int op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min"};
  return op >= 0 && op < 4 ? kNames[op] : "-";
}

void reduce(const std::vector<const char*>& parts, char* out, size_t items, int dtype, int op) {
  switch (dtype) {
    case kNcclInt8: return reduce_plain<int8_t>(parts, out, items, op);
    case kNcclUint8: return reduce_plain<uint8_t>(parts, out, items, op);
    case kNcclInt32: return reduce_plain<int32_t>(parts, out, items, op);
    case kUint32: return reduce_plain<uint32_t>(parts, out, items, op);
    case kNcclInt64: return reduce_plain<int64_t>(parts, out, items, op);
    case kUint64: return reduce_plain<uint64_t>(parts, out, items, op);
    case kNcclFloat32: return reduce_plain<float>(parts, out, items, op);
    case kNcclFloat64: return reduce_plain<double>(parts, out, items, op);
    case kNcclFloat16:
      return reduce_items<uint16_t>(parts, out, items, op, float16_to_float, float_to_float16);
    case kNcclBfloat16:
      return reduce_items<uint16_t>(parts, out, items, op, bfloat16_to_float, float_to_bfloat16);
    default: return;
  }
}

}  // namespace gpudist::doubles
