// Interpreter for PTX kernels on the CPU. It executes one instruction of one thread at a time and
// checks every memory access. tests/ptx/program.py writes the programs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpudist::ptx {

// Slots with the same meaning in every program, in the order that program.py uses.
enum Special { kParameter, kShared, kThread, kBlock, kThreads, kBlocks, kLane };

struct Thread;
struct Instruction;
// Execute an instruction; returns the next one, or null at the end of the thread.
using Step = const Instruction* (*)(const Instruction& at, Thread& thread);

struct Instruction {
  static constexpr int kSlots = 9;

  Step step;
  Step unguarded;  // step to take if the guard holds
  const Instruction* target;
  int64_t offset;
  uint16_t slots[kSlots];
  uint16_t guard;
  bool is_guard_negated;
  int line;
  std::string opcode;
};

struct Kernel {
  std::string name;
  uint32_t parameter_bytes = 0;
  uint32_t shared_bytes = 0;
  uint32_t first_register = 0;
  uint32_t registers = 0;
  std::vector<uint64_t> constants;
  std::vector<Instruction> instructions;
  std::vector<std::string> text;  // one line per instruction, as written by program.py

  uint32_t slots() const {
    return first_register + registers + static_cast<uint32_t>(constants.size());
  }
};

// Throws std::runtime_error if a line cannot be parsed or has an unknown opcode.
std::vector<Kernel> read_program(const std::string& path);
// Replace an instruction, given as a line in program.py's format.
void replace(Kernel& kernel, size_t index, const std::string& text);

// Description of an error in a launch, which ends there.
struct Fault {
  std::string text;
};

// Memory range that an access may use.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  const char* kind = "";
};
// Find the live range that contains an address, or a neighbouring one whose end is at most
// `address`.
using FindMemory = std::function<Range(uint64_t address)>;

// Number of executions of each instruction.
struct Counts {
  std::vector<uint64_t> threads;
  // Per warp: the count of the lane that executed it most often. Not counted if empty.
  std::vector<uint64_t> warps;
  // Sum of the bits of all float64 values that were rounded to float32, modulo 2^64.
  uint64_t rounded = 0;
};

struct Launch {
  const Kernel* kernel = nullptr;
  const void* parameter = nullptr;
  uint32_t blocks = 0;
  uint32_t threads = 0;
  uint64_t seed = 0;  // for the order of threads
  // Number of blocks whose threads alternate after a few instructions. In other launches each
  // thread runs to its end.
  uint32_t blocks_at_once = 1;
  bool takes_turns = false;
  // Execute every `block_stride`-th block only.
  uint32_t block_stride = 1;
  uint64_t most_steps = uint64_t{1} << 40;  // per thread
};

// Number of times that memory was allocated or freed: a range found earlier may no longer exist.
std::atomic<uint64_t>& memory_changes();

// Throws Fault.
void execute(const Launch& launch, const FindMemory& find_memory, Counts& counts);

}  // namespace gpudist::ptx
