// Reductions of the NCCL double, in ascending rank order. 16-bit floats are reduced in float32 and
// rounded once.
#pragma once

#include <cstddef>
#include <vector>

namespace gpudist::doubles {

// Size of an item, 0 if the double does not know the ncclDataType_t.
size_t dtype_bytes(int dtype);
const char* dtype_name(int dtype);
const char* op_name(int op);

void reduce(const std::vector<const char*>& parts, char* out, size_t items, int dtype, int op);

}  // namespace gpudist::doubles
