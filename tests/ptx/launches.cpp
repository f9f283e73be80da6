// Compare random launches of the compiled kernels with loops over the cells.
//
//   launches COUNT SEED [mutants]
//
// prints, for each kernel, its name and how often each of its instructions was executed, then
// `passed` or the first error. With `mutants` it then reads lines from standard input:
//   constant KERNEL VALUE          adds a constant to a kernel
//   mutant KERNEL INSTRUCTION TEXT runs the launches that execute this instruction, replaced by
//                                  TEXT, until one has an error or another number of memory
//                                  accesses; prints the number of launches, and the error or
//                                  nothing
#include "launches.h"

#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime.h"

namespace {

using namespace gpudist;

// Far more than any thread takes.
constexpr uint64_t kMostSteps = 1'000'000;
// Small launches tried per mutant, as a part of all (more if more of them execute it), and the
// number of large ones.
constexpr size_t kPartTried = 4, kMostLarge = 48;

// For every kernel and instruction, the launches that execute it.
using Executing = std::vector<std::vector<std::vector<uint32_t>>>;

// Loads and stores of all threads of all launches so far.
uint64_t accesses() {
  uint64_t sum = 0;
  for (size_t k = 0; k < ptx::kernels().size(); ++k) {
    const std::vector<ptx::Instruction>& instructions = ptx::kernels()[k].instructions;
    for (size_t at = 0; at < instructions.size(); ++at) {
      const std::string kind = instructions[at].opcode.substr(0, 3);
      if (kind == "ld." || kind == "st.") sum += ptx::counts()[k].threads[at];
    }
  }
  return sum;
}

// Error of a launch, and its number of memory accesses.
struct Outcome {
  std::string wrong;
  uint64_t accesses;
};

Outcome run_one(uint64_t seed, uint64_t index) {
  const uint64_t before = accesses();
  std::string wrong = ptx::run_launch(seed, index);
  return {std::move(wrong), accesses() - before};
}

// Number of accesses of the unmodified kernel, cached by launch.
uint64_t usual_accesses(uint64_t seed, uint64_t index) {
  static std::map<uint64_t, uint64_t> known;
  const auto found = known.find(index);
  if (found != known.end()) return found->second;
  return known[index] = run_one(seed, index).accesses;
}

// How a launch of a mutant differs, or an empty string.
std::string noticed(ptx::Kernel& kernel, size_t at, const std::string& text, uint64_t seed,
                    uint64_t index) {
  const uint64_t usual = usual_accesses(seed, index);
  ptx::replace(kernel, at, text);
  const Outcome found = run_one(seed, index);
  ptx::replace(kernel, at, kernel.text[at]);
  if (!found.wrong.empty() || found.accesses == usual) return found.wrong;
  return std::to_string(found.accesses) + " accesses, usually " + std::to_string(usual);
}

std::string run_all(uint64_t count, uint64_t seed, Executing* executing) {
  std::vector<ptx::Counts> all = ptx::counts();
  std::string wrong;
  for (uint64_t i = 0; i < count && wrong.empty(); ++i) {
    wrong = ptx::run_launch(seed, i);
    if (!wrong.empty()) wrong = "launch " + std::to_string(i) + ": " + wrong;
    if (executing == nullptr) continue;
    for (size_t k = 0; k < all.size(); ++k) {
      const std::vector<uint64_t>& now = ptx::counts()[k].threads;
      for (size_t at = 0; at < now.size(); ++at) {
        if (now[at] > all[k].threads[at]) (*executing)[k][at].push_back(static_cast<uint32_t>(i));
      }
      all[k].threads = now;
    }
  }
  return wrong;
}

void print_counts() {
  for (size_t k = 0; k < ptx::kernels().size(); ++k) {
    std::printf("%s", ptx::kernels()[k].name.c_str());
    for (uint64_t times : ptx::counts()[k].threads) {
      std::printf(" %lu", static_cast<unsigned long>(times));
    }
    std::printf("\n");
  }
}

void run_mutant(size_t k, size_t at, const std::string& text, uint64_t count, uint64_t seed,
                const Executing& executing) {
  ptx::Kernel& kernel = ptx::kernels().at(k);
  std::string wrong;
  size_t tried = 0;
  std::set<uint64_t> classes;
  for (uint32_t i : executing[k][at]) {
    wrong = noticed(kernel, at, text, seed, i);
    classes.insert(i % ptx::kLaunchClasses);
    ++tried;
    if (!wrong.empty()) break;
  }
  const auto try_more = [&](uint64_t first, size_t most) {
    for (uint64_t i = first; wrong.empty() && tried < most && !classes.empty(); ++i) {
      if (classes.count(i % ptx::kLaunchClasses) == 0) continue;
      wrong = noticed(kernel, at, text, seed, i);
      ++tried;
    }
  };
  try_more(count, count / kPartTried);
  try_more(ptx::kFirstLarge, tried + kMostLarge);
  std::printf("%zu\t%s\n", tried, wrong.c_str());
  std::fflush(stdout);
}

void run_mutants(uint64_t count, uint64_t seed, const Executing& executing) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string word, text;
    size_t k = 0, at = 0;
    words >> word >> k >> at;
    if (word == "constant") {
      ptx::kernels().at(k).constants.push_back(at);
    } else if (word == "mutant" && std::getline(words >> std::ws, text)) {
      run_mutant(k, at, text, count, seed, executing);
    } else {
      throw std::runtime_error("neither a constant nor a mutant: " + line);
    }
  }
}

int run(uint64_t count, uint64_t seed, bool with_mutants) {
  ptx::manner().most_steps = kMostSteps;
  Executing executing;
  for (const ptx::Kernel& kernel : ptx::kernels()) {
    executing.emplace_back(kernel.instructions.size());
  }
  const std::string wrong = run_all(count, seed, with_mutants ? &executing : nullptr);
  print_counts();
  std::printf("%s\n", wrong.empty() ? "passed" : wrong.c_str());
  std::fflush(stdout);
  if (wrong.empty() && with_mutants) run_mutants(count, seed, executing);
  return wrong.empty() ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  try {
    return run(std::strtoull(arguments[1], nullptr, 10), std::strtoull(arguments[2], nullptr, 10),
               count > 3 && std::string(arguments[3]) == "mutants");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "launches: %s\n", error.what());
    return 2;
  }
}
