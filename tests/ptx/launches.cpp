// Random launches of the compiled kernels against loops over the cells.
//
//   launches COUNT SEED            prints `KERNEL NAME` and how often each of its instructions was
//                                  executed; then `passed` or what was wrong first
//   launches COUNT SEED MUTANTS    runs, for each line KERNEL INSTRUCTION TEXT of a file, the
//   launches
//                                  that execute this instruction with TEXT in its place, up to the
//                                  first that is wrong; prints how many, and what was wrong or
//                                  nothing
#include "launches.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime.h"

namespace {

using namespace gpudist;

// More than any thread takes, by far.
constexpr uint64_t kMostSteps = 200'000;

// For every kernel and instruction, the launches that execute it.
using Executing = std::vector<std::vector<std::vector<uint32_t>>>;

std::string run_all(uint64_t count, uint64_t seed, Executing* executing) {
  for (uint64_t i = 0; i < count; ++i) {
    if (executing != nullptr) ptx::forget_counts();
    const std::string wrong = ptx::run_launch(seed, i);
    if (!wrong.empty()) return "launch " + std::to_string(i) + ": " + wrong;
    if (executing == nullptr) continue;
    for (size_t k = 0; k < executing->size(); ++k) {
      const std::vector<uint64_t>& threads = ptx::counts()[k].threads;
      for (size_t at = 0; at < threads.size(); ++at) {
        if (threads[at] > 0) (*executing)[k][at].push_back(static_cast<uint32_t>(i));
      }
    }
  }
  return "";
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

void run_mutant(const std::string& line, uint64_t seed, const Executing& executing) {
  size_t k = 0, at = 0;
  std::istringstream words(line);
  std::string text;
  if (!(words >> k >> at) || !std::getline(words >> std::ws, text)) {
    throw std::runtime_error("no mutant: " + line);
  }
  ptx::Kernel& kernel = ptx::kernels().at(k);
  const std::string original = kernel.text[at];
  ptx::replace(kernel, at, text);
  std::string wrong;
  size_t tried = 0;
  for (uint32_t i : executing[k][at]) {
    wrong = ptx::run_launch(seed, i);
    ++tried;
    if (!wrong.empty()) break;
  }
  ptx::replace(kernel, at, original);
  std::printf("%zu\t%s\n", tried, wrong.c_str());
}

int run(uint64_t count, uint64_t seed, const char* mutants) {
  ptx::manner().most_steps = kMostSteps;
  if (mutants == nullptr) {
    const std::string wrong = run_all(count, seed, nullptr);
    print_counts();
    std::printf("%s\n", wrong.empty() ? "passed" : wrong.c_str());
    return wrong.empty() ? 0 : 1;
  }
  Executing executing;
  for (const ptx::Kernel& kernel : ptx::kernels()) {
    executing.emplace_back(kernel.instructions.size());
  }
  const std::string wrong = run_all(count, seed, &executing);
  if (!wrong.empty()) throw std::runtime_error("without a mutant: " + wrong);
  std::ifstream file(mutants);
  for (std::string line; std::getline(file, line);) run_mutant(line, seed, executing);
  return 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3) return 2;
  try {
    return run(std::strtoull(arguments[1], nullptr, 10), std::strtoull(arguments[2], nullptr, 10),
               count > 3 ? arguments[3] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "launches: %s\n", error.what());
    return 2;
  }
}
