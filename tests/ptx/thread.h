// State of one thread of a launch.
#pragma once

#include <cstdint>

#include "machine.h"

namespace gpudist::ptx {

struct Thread {
  uint64_t* slots;
  const Instruction* at;  // next instruction
  struct Execution* execution;
  uint32_t block, number;
  uint64_t steps = 0;
  bool at_barrier = false;
};

enum class Space { kGeneric, kParameter, kGlobal, kShared };

// Check an access and return its address in host memory. Throws Fault.
uint64_t checked(const Instruction& at, Thread& thread, Space space, bool is_store, uint32_t bytes);

uint64_t random_word(Thread& thread);

// Count a float64 value that is rounded to float32.
void count_rounded(Thread& thread, double value);

[[noreturn]] void fault(const Instruction& at, const Thread& thread, const std::string& what);

}  // namespace gpudist::ptx
