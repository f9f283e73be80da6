// Memory of the double of CUDA's runtime: the host's, and no address is ever given twice. What
// touches memory after its end is found.
#pragma once

#include <cstddef>

namespace gpudist::doubles {

// kMapped: by the driver's calls for virtual memory, as ncclMemAlloc does it.
enum class MemoryKind { kDevice, kPinned, kMapped };

// Filled with a byte of its own; null where there is none left, or nothing is asked for.
void* take_memory(MemoryKind kind, int device, size_t bytes);
// The device of memory that was taken as this kind, else -1.
int device_of(MemoryKind kind, const void* memory);
// From now on nothing may touch it; does not wait for those that do.
void end_memory(void* memory, const char* call);

// Whether NCCL, asked to, registers it by itself while a graph is captured.
bool is_mapped(const void* memory);

// Whether work on a stream may touch memory; if not, the device is broken. `what` names the work.
bool may_touch(const void* memory, size_t bytes, const char* what);

}  // namespace gpudist::doubles
