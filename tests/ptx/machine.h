// Executes kernels of PTX on the CPU, one instruction of one thread at a time, and checks every
// access of memory. tests/ptx/program.py writes the programs it reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gpudist::ptx {

// Slots that hold the same in every program; program.py has them in this order.
enum Special { kParameter, kShared, kThread, kBlock, kThreads, kBlocks, kLane };

struct Thread;
struct Instruction;
// Does what an instruction says; returns the one that follows, null at the end of the thread.
using Step = const Instruction* (*)(const Instruction& at, Thread& thread);

struct Instruction {
  static constexpr int kSlots = 9;

  Step step;
  Step unguarded;  // of an instruction with a guard
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
  std::vector<std::string> text;  // one line an instruction, as program.py wrote it

  uint32_t slots() const {
    return first_register + registers + static_cast<uint32_t>(constants.size());
  }
};

// Throws std::runtime_error if a line is no program, or an opcode unknown.
std::vector<Kernel> read_program(const std::string& path);
// Make one instruction another, as program.py wrote it.
void replace(Kernel& kernel, size_t index, const std::string& text);

// What went wrong in a launch, in words; the launch ends there.
struct Fault {
  std::string text;
};

// Memory that an access may be in.
struct Range {
  uint64_t begin = 0;
  uint64_t end = 0;
  const char* kind = "";
};
// The live memory that holds an address, or, with end at most `address`, what lies next to it.
using FindMemory = std::function<Range(uint64_t address)>;

// How often each instruction has been executed.
struct Counts {
  std::vector<uint64_t> threads;
  // Also by warps: that of the lane that executed it most often. Left out where empty.
  std::vector<uint64_t> warps;
};

struct Launch {
  const Kernel* kernel = nullptr;
  const void* parameter = nullptr;
  uint32_t blocks = 0;
  uint32_t threads = 0;
  uint64_t seed = 0;  // of the threads' order
  // Blocks whose threads run in turns of a few instructions; otherwise each thread runs to its end.
  uint32_t blocks_at_once = 1;
  bool takes_turns = false;
  // Only every so many-th block.
  uint32_t block_stride = 1;
  uint64_t most_steps = uint64_t{1} << 40;  // of one thread
};

// How often any memory has been made or released: a range that was found once may have ended.
std::atomic<uint64_t>& memory_changes();

// Throws Fault.
void execute(const Launch& launch, const FindMemory& find_memory, Counts& counts);

}  // namespace gpudist::ptx
