// What the programs of random launches share: numbers, the memory that a launch may use, and its
// first error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

#include "core/box.h"
#include "device/device_api.h"

namespace gpudist {

// The table that the native core uses.
const DeviceApi* cuda_api();

namespace ptx {

// Source of random choices.
extern std::mt19937_64 random_bits;

int64_t between(int64_t low, int64_t high);
// Whether the first of `count` equally likely cases is drawn.
bool one_of(int64_t count);

// Begin launch number `index` of a seed: it has no memory yet.
void begin_launch(uint64_t seed, uint64_t index);
void add_live(const void* begin, int64_t bytes, const char* kind);

// Pages of which only touched ones take memory.
char* reserve(int64_t bytes);

// Whether items of a float dtype are bitwise equal, except that any NaN equals any other.
bool are_equal(const char* found, const char* expected, int64_t bytes, Dtype dtype);

// Return the first error of the launch that began. `refusal` is its error code; throws if it is not
// zero.
std::string fault_of(int refusal);

}  // namespace ptx

}  // namespace gpudist
