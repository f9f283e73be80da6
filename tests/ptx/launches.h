// One random launch of a compiled kernel.
#pragma once

#include <cstdint>
#include <string>

namespace gpudist::ptx {

// Launches whose numbers have the same remainder are of one dtype and one kernel.
constexpr uint64_t kLaunchClasses = 48;

// Launches from here on are of many cells each.
constexpr uint64_t kFirstLarge = kLaunchClasses << 32;

// Carries out launch number `index` of those of a seed; returns what was wrong, empty if nothing.
// Throws if the launch itself was refused.
std::string run_launch(uint64_t seed, uint64_t index);

}  // namespace gpudist::ptx
