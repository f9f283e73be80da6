#include "machine.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>

#include "opcodes.h"
#include "thread.h"

namespace gpudist::ptx {

namespace {

constexpr uint32_t kWarp = 32;

const Instruction* guarded(const Instruction& at, Thread& thread) {
  const bool holds = (thread.slots[at.guard] & 1) != 0;
  return holds != at.is_guard_negated ? at.unguarded(at, thread) : &at + 1;
}

// Parse a line LINE OPCODE GUARD OFFSET TARGET SLOTS...
Instruction parsed(const std::string& text, const Instruction* first) {
  std::istringstream words(text);
  Instruction made{};
  std::string guard;
  int64_t target = -1;
  if (!(words >> made.line >> made.opcode >> guard >> made.offset >> target)) {
    throw std::runtime_error("no instruction of a program: " + text);
  }
  int count = 0;
  for (uint16_t slot = 0; words >> slot; ++count) {
    if (count == Instruction::kSlots) throw std::runtime_error("too many operands: " + text);
    made.slots[count] = slot;
  }
  const auto found = opcodes().find(made.opcode);
  if (found == opcodes().end()) {
    throw std::runtime_error("PTX line " + std::to_string(made.line) + ": the machine has no " +
                             made.opcode + "; put it into tests/ptx/opcodes.cpp");
  }
  if (found->second.operands > count) throw std::runtime_error("too few operands: " + text);
  made.step = found->second.step;
  if (target >= 0) made.target = first + target;
  if (guard != "-1") {
    made.is_guard_negated = guard[0] == '!';
    made.guard = static_cast<uint16_t>(std::stoi(guard.substr(made.is_guard_negated ? 1 : 0)));
    made.unguarded = made.step;
    made.step = guarded;
  }
  return made;
}

bool has_barriers(const Kernel& kernel) {
  const auto is_barrier = [](const Instruction& at) { return at.opcode.rfind("bar", 0) == 0; };
  return std::any_of(kernel.instructions.begin(), kernel.instructions.end(), is_barrier);
}

}  // namespace

std::vector<Kernel> read_program(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("there is no program " + path);
  std::vector<Kernel> kernels;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "kernel") {
      Kernel& kernel = kernels.emplace_back();
      words >> kernel.name >> kernel.parameter_bytes >> kernel.shared_bytes >>
          kernel.first_register >> kernel.registers;
    } else if (word == "constant") {
      words >> kernels.back().constants.emplace_back();
    } else if (word == "end") {
      Kernel& kernel = kernels.back();
      kernel.instructions.resize(kernel.text.size());
      for (size_t i = 0; i < kernel.text.size(); ++i) replace(kernel, i, kernel.text[i]);
    } else {
      kernels.back().text.push_back(line);
    }
  }
  return kernels;
}

void replace(Kernel& kernel, size_t index, const std::string& text) {
  kernel.instructions.at(index) = parsed(text, kernel.instructions.data());
}

std::atomic<uint64_t>& memory_changes() {
  static std::atomic<uint64_t> changes{0};
  return changes;
}

// A launch during its execution.
struct Execution {
  // A running block, with registers for all of its threads.
  struct Block {
    uint32_t number;
    std::vector<Thread> threads;
    std::vector<uint64_t> slots;
    std::vector<uint64_t> shared;
    std::vector<uint32_t> running;  // indices of threads that have not finished
  };

  Execution(const Launch& launch, const FindMemory& find_memory, Counts& counts)
      : launch(launch),
        kernel(*launch.kernel),
        find_memory(find_memory),
        counts(counts),
        bits(launch.seed),
        first(kernel.instructions.data()),
        parameter(reinterpret_cast<uint64_t>(launch.parameter)),
        keeps_registers(launch.takes_turns || has_barriers(kernel)) {
    counts.threads.resize(kernel.instructions.size());
    start_slots.resize(kernel.slots());
    // Registers start with random bits, because programs may not rely on them.
    for (uint64_t& slot : start_slots) slot = bits();
    start_slots[kParameter] = parameter;
    start_slots[kThreads] = launch.threads;
    start_slots[kBlocks] = launch.blocks;
    std::copy(kernel.constants.begin(), kernel.constants.end(),
              start_slots.end() - static_cast<int64_t>(kernel.constants.size()));
  }

  void run() {
    std::vector<uint32_t> order;
    for (uint32_t b = 0; b < launch.blocks; b += launch.block_stride) order.push_back(b);
    std::shuffle(order.begin(), order.end(), bits);
    std::vector<Block> blocks(std::min<size_t>(launch.blocks_at_once, order.size()));
    for (size_t begin = 0; begin < order.size(); begin += blocks.size()) {
      const size_t count = std::min(blocks.size(), order.size() - begin);
      for (size_t i = 0; i < count; ++i) start(blocks[i], order[begin + i]);
      if (!launch.takes_turns) {
        for (size_t i = 0; i < count; ++i) run_to_the_end(blocks[i]);
      } else {
        run_in_turns(blocks, count);
      }
    }
  }

  void start(Block& block, uint32_t number) {
    const uint32_t held = keeps_registers ? launch.threads : 1;
    block.number = number;
    block.threads.resize(launch.threads);
    block.slots.resize(start_slots.size() * held);
    block.shared.assign((kernel.shared_bytes + 7) / 8, bits());
    block.running.resize(launch.threads);
    std::iota(block.running.begin(), block.running.end(), 0u);
    std::shuffle(block.running.begin(), block.running.end(), bits);
    for (uint32_t i = 0; keeps_registers && i < launch.threads; ++i) start_thread(block, i);
  }

  void start_thread(Block& block, uint32_t i) {
    uint64_t* const own = block.slots.data() + (keeps_registers ? i * start_slots.size() : 0);
    std::copy(start_slots.begin(), start_slots.end(), own);
    own[kShared] = reinterpret_cast<uint64_t>(block.shared.data());
    own[kThread] = i;
    own[kBlock] = block.number;
    own[kLane] = i % kWarp;
    block.threads[i] = Thread{own, first, this, block.number, i};
  }

  // Run the threads one after the other, each to its end or to a barrier.
  void run_to_the_end(Block& block) {
    warps.assign(counts.warps.empty() ? 0 : (launch.threads + kWarp - 1) / kWarp,
                 std::vector<uint32_t>());
    while (!block.running.empty()) {
      for (uint32_t i : block.running) {
        if (!keeps_registers) start_thread(block, i);
        run(block.threads[i], ~uint64_t{0});
      }
      pass_barrier(block);
    }
  }

  void run_in_turns(std::vector<Block>& blocks, size_t count) {
    while (true) {
      std::vector<Block*> running;
      for (size_t i = 0; i < count; ++i) {
        if (!blocks[i].running.empty()) running.push_back(&blocks[i]);
      }
      if (running.empty()) return;
      for (int turn = 0; turn < 64; ++turn) {
        Block& block = *running[bits() % running.size()];
        if (block.running.empty()) continue;
        const size_t place = bits() % block.running.size();
        Thread& thread = block.threads[block.running[place]];
        run(thread, bits() % 64);
        if (thread.at == nullptr) {
          block.running[place] = block.running.back();
          block.running.pop_back();
        }
      }
      for (Block* block : running) pass_barrier(*block);
    }
  }

  // Remove finished threads; release the others once all of them wait.
  static void pass_barrier(Block& block) {
    std::vector<uint32_t>& running = block.running;
    const auto has_ended = [&](uint32_t i) { return block.threads[i].at == nullptr; };
    running.erase(std::remove_if(running.begin(), running.end(), has_ended), running.end());
    const auto waits = [&](uint32_t i) { return block.threads[i].at_barrier; };
    if (!std::all_of(running.begin(), running.end(), waits)) return;
    for (uint32_t i : running) block.threads[i].at_barrier = false;
  }

  void run(Thread& thread, uint64_t steps) {
    if (thread.at_barrier) return;
    const uint64_t most = std::min(steps, launch.most_steps - thread.steps);
    const Instruction* at = thread.at;
    uint64_t* const executed = counts.threads.data();
    const bool counts_warps = !counts.warps.empty();
    uint64_t step = 0;
    for (; at != nullptr && step < most && !thread.at_barrier; ++step) {
      ++executed[at - first];
      if (counts_warps) count_in_warp(thread, at - first);
      at = at->step(*at, thread);
    }
    thread.steps += step;
    thread.at = at;
    if (at != nullptr && thread.steps >= launch.most_steps) {
      fault(*at, thread,
            "the thread has not ended after " + std::to_string(thread.steps) + " instructions");
    }
  }

  // Count per warp: lanes execute an instruction together unless they have diverged for good.
  void count_in_warp(const Thread& thread, size_t instruction) {
    if (thread.number != lane_counted || thread.block != block_counted) {
      lane_counts.assign(kernel.instructions.size(), 0);
      lane_counted = thread.number;
      block_counted = thread.block;
    }
    std::vector<uint32_t>& warp = warps[thread.number / kWarp];
    if (warp.empty()) warp.resize(kernel.instructions.size());
    if (++lane_counts[instruction] <= warp[instruction]) return;
    ++warp[instruction];
    ++counts.warps[instruction];
  }

  Range memory_at(uint64_t address) {
    if (address - parameter < kernel.parameter_bytes) {
      return {parameter, parameter + kernel.parameter_bytes, "parameter"};
    }
    const uint64_t changes = memory_changes().load(std::memory_order_acquire);
    if (changes != seen_changes) found.fill({});
    seen_changes = changes;
    for (const Range& range : found) {
      if (address - range.begin < range.end - range.begin) return range;
    }
    return found[next_found++ % found.size()] = find_memory(address);
  }

  const Launch& launch;
  const Kernel& kernel;
  const FindMemory& find_memory;
  Counts& counts;
  std::mt19937_64 bits;
  const Instruction* const first;
  const uint64_t parameter;
  const bool keeps_registers;  // for all threads of a block; otherwise only for the running one
  // Ranges of recent accesses.
  std::array<Range, 4> found{};
  size_t next_found = 0;
  uint64_t seen_changes = 0;
  std::vector<uint64_t> start_slots;
  std::vector<std::vector<uint32_t>> warps;
  std::vector<uint32_t> lane_counts;
  uint32_t lane_counted = ~0u, block_counted = ~0u;
};

uint64_t random_word(Thread& thread) {
  return thread.execution->bits();
}

void count_rounded(Thread& thread, double value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  thread.execution->counts.rounded += bits;
}

void fault(const Instruction& at, const Thread& thread, const std::string& what) {
  std::ostringstream text;
  text << what << "; kernel " << thread.execution->kernel.name << ", PTX line " << at.line << " ("
       << at.opcode << "), block " << thread.block << ", thread " << thread.number;
  throw Fault{text.str()};
}

uint64_t checked(const Instruction& at, Thread& thread, Space space, bool is_store,
                 uint32_t bytes) {
  Execution& execution = *thread.execution;
  const uint64_t address = thread.slots[at.slots[0]] + static_cast<uint64_t>(at.offset);
  const auto fail = [&](const std::string& what) {
    std::ostringstream text;
    text << (is_store ? "store of " : "load of ") << bytes << " bytes at 0x" << std::hex << address
         << std::dec << ": " << what;
    fault(at, thread, text.str());
  };
  const auto describe = [](const Range& range) {
    std::ostringstream text;
    text << range.kind << " of " << range.end - range.begin << " bytes from 0x" << std::hex
         << range.begin;
    return text.str();
  };
  if (address % bytes != 0) {
    fail("misaligned, in " + describe(execution.memory_at(address)) +
         "; an access must be at a multiple of its size");
  }
  if (space == Space::kShared) {
    // Addresses count from the beginning of the block's shared memory.
    const uint64_t end = execution.kernel.shared_bytes;
    if (address >= end || address + bytes > end) fail("outside of the block's shared memory");
    return thread.slots[kShared] + address;
  }
  const Range range = execution.memory_at(address);
  if (address < range.begin || address + bytes > range.end) {
    fail(range.end == range.begin ? "no live memory is near"
                                  : "out of bounds; next to it is " + describe(range));
  }
  const bool in_parameter = range.begin == execution.parameter;
  if (in_parameter && is_store) fail("the parameter is read-only");
  if (in_parameter != (space == Space::kParameter) && space != Space::kGeneric) {
    fail("another space of addresses than the instruction's: " + describe(range));
  }
  return address;
}

void execute(const Launch& launch, const FindMemory& find_memory, Counts& counts) {
  Execution(launch, find_memory, counts).run();
}

}  // namespace gpudist::ptx
