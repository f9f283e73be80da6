// Live memory of the process, as a library in LD_PRELOAD sees it.
#pragma once

#include <cstdint>

// The live block with `address` in it, or the one that ends at it or before; zeros without one.
extern "C" void gpudist_heap_find(uint64_t address, uint64_t* begin, uint64_t* end);
