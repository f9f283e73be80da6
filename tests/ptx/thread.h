// One thread of a launch, as the opcodes see it.
#pragma once

#include <cstdint>

#include "machine.h"

namespace gpudist::ptx {

struct Thread {
  uint64_t* slots;
  const Instruction* at;  // the next
  struct Execution* execution;
  uint32_t block, number;
  uint64_t steps = 0;
  bool at_barrier = false;
};

enum class Space { kGeneric, kParameter, kGlobal, kShared };

// Returns the address in the host's memory, after it has been checked. Throws Fault.
uint64_t checked(const Instruction& at, Thread& thread, Space space, bool is_store, uint32_t bytes);

[[noreturn]] void fault(const Instruction& at, const Thread& thread, const std::string& what);

}  // namespace gpudist::ptx
