// One random launch of a compiled kernel.
#pragma once

#include <cstdint>
#include <string>

namespace gpudist::ptx {

// Launches whose numbers are congruent modulo this have the same dtype and kernel.
constexpr uint64_t kLaunchClasses = 48;

// Launches from this number on have many cells each.
constexpr uint64_t kFirstLarge = kLaunchClasses << 32;

// Run launch number `index` of a seed; returns the error, or an empty string. Throws if the launch
// itself was refused.
std::string run_launch(uint64_t seed, uint64_t index);

}  // namespace gpudist::ptx
