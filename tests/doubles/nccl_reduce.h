// Sums and their like of the NCCL double: in ascending rank order, 16-bit floats in float32 and
// rounded once.
#pragma once

#include <cstddef>
#include <vector>

namespace gpudist::doubles {

// Zero for what is no ncclDataType_t that the double knows.
size_t dtype_bytes(int dtype);
const char* dtype_name(int dtype);
const char* op_name(int op);

void reduce(const std::vector<const char*>& parts, char* out, size_t items, int dtype, int op);

}  // namespace gpudist::doubles
