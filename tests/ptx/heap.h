// Live memory of the process, as recorded by a library in LD_PRELOAD.
#pragma once

#include <cstdint>

// The live block that contains `address`, otherwise the last one that ends at or before it,
// otherwise zeros.
extern "C" void gpudist_heap_find(uint64_t address, uint64_t* begin, uint64_t* end);
