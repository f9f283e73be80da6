// Memory of the CUDA driver double: host memory whose addresses are never reused, so that use
// after release is detected.
#pragma once

#include <cstddef>

namespace gpudist::doubles {

// kMapped: mapped with the driver's virtual memory calls, like ncclMemAlloc.
enum class MemoryKind { kDevice, kPinned, kMapped };

// Allocate memory filled with a marker byte. Returns null if there is no memory left or `bytes` is
// 0.
void* take_memory(MemoryKind kind, int device, size_t bytes);
// Device on which memory of this kind was allocated, otherwise -1.
int device_of(MemoryKind kind, const void* memory);
// Make the memory inaccessible without waiting for work that uses it.
void end_memory(void* memory, const char* call);

// Whether NCCL, if enabled, registers this memory automatically during graph capture.
bool is_mapped(const void* memory);

// Check that work on a stream may access memory; otherwise the device breaks. `what` names the
// work.
bool may_touch(const void* memory, size_t bytes, const char* what);

}  // namespace gpudist::doubles
