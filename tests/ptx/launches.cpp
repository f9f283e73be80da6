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
// Further launches with the dtypes and kernels of those that execute an instruction, of which a
// mutant is tried in those that execute it too: as many small ones as there were at first, until it
// has been tried in a part of that number; then so many large ones, until it has been in the most.
constexpr size_t kPartTried = 4, kLargeSeen = 8 * ptx::kLaunchClasses, kMostLarge = 48;

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

// Error of a launch, its number of memory accesses, and which instructions of each kernel it
// executes.
struct Outcome {
  std::string wrong;
  uint64_t accesses;
  std::vector<std::vector<bool>> executes;
};

Outcome run_one(uint64_t seed, uint64_t index) {
  const std::vector<ptx::Counts> before = ptx::counts();
  const uint64_t accesses_before = accesses();
  Outcome found{ptx::run_launch(seed, index), accesses() - accesses_before, {}};
  for (size_t k = 0; k < before.size(); ++k) {
    const std::vector<uint64_t>&then = before[k].threads, &now = ptx::counts()[k].threads;
    found.executes.emplace_back(now.size());
    for (size_t at = 0; at < now.size(); ++at) found.executes[k][at] = now[at] > then[at];
  }
  return found;
}

// Outcome of the unmodified kernel, cached by launch.
const Outcome& usual(uint64_t seed, uint64_t index) {
  static std::map<uint64_t, Outcome> known;
  const auto found = known.find(index);
  return found != known.end() ? found->second : known[index] = run_one(seed, index);
}

// How a launch of a mutant differs, or an empty string.
std::string noticed(ptx::Kernel& kernel, size_t at, const std::string& text, uint64_t seed,
                    uint64_t index) {
  const uint64_t expected = usual(seed, index).accesses, before = accesses();
  ptx::replace(kernel, at, text);
  std::string wrong = ptx::run_launch(seed, index);
  const uint64_t found = accesses() - before;
  ptx::replace(kernel, at, kernel.text[at]);
  if (!wrong.empty() || found == expected) return wrong;
  return std::to_string(found) + " accesses, usually " + std::to_string(expected);
}

std::string run_all(uint64_t count, uint64_t seed, bool with_mutants) {
  std::string wrong;
  for (uint64_t i = 0; i < count && wrong.empty(); ++i) {
    wrong = with_mutants ? usual(seed, i).wrong : ptx::run_launch(seed, i);
    if (!wrong.empty()) wrong = "launch " + std::to_string(i) + ": " + wrong;
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

void run_mutant(size_t k, size_t at, const std::string& text, uint64_t count, uint64_t seed) {
  ptx::Kernel& kernel = ptx::kernels().at(k);
  std::string wrong;
  size_t tried = 0;
  std::set<uint64_t> classes;
  const auto try_one = [&](uint64_t i) {
    if (!usual(seed, i).executes[k][at]) return;
    classes.insert(i % ptx::kLaunchClasses);
    wrong = noticed(kernel, at, text, seed, i);
    ++tried;
  };
  const auto try_further = [&](uint64_t i, uint64_t seen, size_t most) {
    for (; seen > 0 && wrong.empty() && tried < most && !classes.empty(); ++i) {
      if (classes.count(i % ptx::kLaunchClasses) == 0) continue;
      try_one(i);
      --seen;
    }
  };
  for (uint64_t i = 0; i < count && wrong.empty(); ++i) try_one(i);
  try_further(count, count, count / kPartTried);
  try_further(ptx::kFirstLarge, kLargeSeen, tried + kMostLarge);
  std::printf("%zu\t%s\n", tried, wrong.c_str());
  std::fflush(stdout);
}

void run_mutants(uint64_t count, uint64_t seed) {
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream words(line);
    std::string word, text;
    size_t k = 0, at = 0;
    words >> word >> k >> at;
    if (word == "constant") {
      ptx::kernels().at(k).constants.push_back(at);
    } else if (word == "mutant" && std::getline(words >> std::ws, text)) {
      run_mutant(k, at, text, count, seed);
    } else {
      throw std::runtime_error("neither a constant nor a mutant: " + line);
    }
  }
}

int run(uint64_t count, uint64_t seed, bool with_mutants) {
  ptx::manner().most_steps = kMostSteps;
  const std::string wrong = run_all(count, seed, with_mutants);
  print_counts();
  std::printf("%s\n", wrong.empty() ? "passed" : wrong.c_str());
  std::fflush(stdout);
  if (wrong.empty() && with_mutants) run_mutants(count, seed);
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
