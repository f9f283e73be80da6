// Run halo exchanges and copies and print how often each instruction was executed. Each line is
// CASE DTYPE BYTES_PER_CELL_MOVED CELLS LANE_BYTES BLOCKS BLOCKS_EXECUTED THREADS KERNEL, followed
// by LINE:THREADS:WARPS for each instruction. tests/ptx/count.py builds this program and reads its
// output. The argument is the approximate number of blocks to execute per launch.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/combine_plan.h"
#include "runtime.h"

namespace gpudist {

const DeviceApi* cuda_api();

namespace ptx {

// All memory belongs to this program. Accesses are checked by the tests, not here.
Range find_other_memory(uint64_t) {
  return {1, ~uint64_t{0}, "memory"};
}

void report(const std::string& fault) {
  std::fprintf(stderr, "%s\n", fault.c_str());
  std::exit(1);
}

}  // namespace ptx

namespace {

using Shape = std::vector<int64_t>;

// The other blocks of a launch are similar.
uint32_t sampled_blocks = 1;
constexpr int kAlignment = 16;

struct Type {
  const char* name;
  Dtype dtype;
};
constexpr Type kTypes[] = {{"float32", Dtype::kFloat32},
                           {"bfloat16", Dtype::kBfloat16},
                           {"float16", Dtype::kFloat16},
                           {"uint8", Dtype::kUint8}};

int64_t product(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

Shape contiguous(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t d = shape.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * shape[d];
  return strides;
}

// Only pages that are touched take memory.
char* memory_of(int64_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  return static_cast<char*>(memory);
}

void run(const std::string& name, const Type& type, const CombineBox& box, int64_t items) {
  const CombinePlan plan(type.dtype, 0, {box});
  const CombineTable table = plan.table(kAlignment);
  const size_t jobs_bytes = (table.jobs.size() * sizeof(table.jobs[0]) + 15) / 16 * 16;
  const size_t views_bytes = table.views.size() * sizeof(table.views[0]);
  std::vector<char> tables(jobs_bytes + views_bytes);
  std::memcpy(tables.data(), table.jobs.data(), table.jobs.size() * sizeof(table.jobs[0]));
  std::memcpy(tables.data() + jobs_bytes, table.views.data(), views_bytes);
  CombineArguments arguments = plan.arguments(table);
  arguments.inline_bytes = static_cast<uint32_t>(tables.size());
  arguments.jobs = reinterpret_cast<decltype(arguments.jobs)>(tables.data());
  arguments.views = reinterpret_cast<decltype(arguments.views)>(tables.data() + jobs_bytes);
  const int64_t bytes = items * item_bytes(type.dtype);
  char* const input = memory_of(bytes);
  char* const output = memory_of(bytes);
  for (char*& buffer : arguments.buffers) buffer = input;
  arguments.buffers[static_cast<int>(Buffer::kOutput)] = output;

  ptx::forget_counts();
  // Odd, so that sampled blocks do not always lie at the same place of a plane.
  const uint32_t stride = (table.blocks / sampled_blocks) | 1u;
  ptx::manner().block_stride = stride;
  ptx::manner().counts_warps = true;
  if (cuda_api()->check_kernels() != 0) std::abort();
  if (cuda_api()->launch_combine(arguments, nullptr) != 0) std::abort();
  for (size_t k = 0; k < ptx::kernels().size(); ++k) {
    const ptx::Counts& counts = ptx::counts()[k];
    if (counts.threads[0] == 0) continue;
    std::printf("%s\t%s\t%ld\t%ld\t%d\t%u\t%u\t%d\t%s", name.c_str(), type.name,
                static_cast<long>(box.views.size() * item_bytes(type.dtype)),
                static_cast<long>(product(box.shape)), CombineTile::kGranule, table.blocks,
                (table.blocks + stride - 1) / stride, CombineArguments::kThreads,
                ptx::kernels()[k].name.c_str());
    for (size_t i = 0; i < counts.threads.size(); ++i) {
      if (counts.threads[i] == 0) continue;
      std::printf("\t%d:%lu:%lu", ptx::kernels()[k].instructions[i].line,
                  static_cast<unsigned long>(counts.threads[i]),
                  static_cast<unsigned long>(counts.warps[i]));
    }
    std::printf("\n");
  }
  munmap(input, bytes);
  munmap(output, bytes);
}

// Cells inside halos of one cell, in a tensor whose first dim is channels.
struct Interior {
  Shape shape, strides;
  int64_t offset, items;
};

Interior interior(const Shape& shape) {
  Shape padded = shape;
  for (size_t d = 1; d < padded.size(); ++d) padded[d] += 2;
  Interior made{shape, contiguous(padded), 0, product(padded)};
  for (size_t d = 1; d < padded.size(); ++d) made.offset += made.strides[d];
  return made;
}

void run_cases(const Type& type) {
  constexpr int64_t kChannels = 16;
  const auto text = [](const Shape& shape) {
    std::string joined = std::to_string(shape[0]);
    for (size_t d = 1; d < shape.size(); ++d) joined += "x" + std::to_string(shape[d]);
    return joined;
  };
  const int64_t cells = 1 << 24;
  run("contiguous copy", type, {{cells}, {{Buffer::kOutput, 0, {1}}, {Buffer::kInput, 0, {1}}}},
      cells);
  const std::vector<Shape> shapes = {{kChannels, 64, 64, 64}, {kChannels, 256, 256, 256},
                                     {kChannels, 66, 66, 66}, {kChannels, 64, 64},
                                     {kChannels, 256, 256},   {kChannels, 66, 66}};
  for (const Shape& shape : shapes) {
    const Interior inside = interior(shape);
    const CombineCells padded{Buffer::kOutput, inside.offset, inside.strides};
    run("interior of a halo, " + text(shape), type,
        {shape, {padded, {Buffer::kInput, 0, contiguous(shape)}}}, inside.items);
  }
  for (const Shape& shape : {shapes[0], shapes[3]}) {
    const Interior inside = interior(shape);
    Shape face = shape;
    face.back() = 1;
    const CombineCells cells{Buffer::kInput, inside.offset, inside.strides};
    const CombineCells packed{Buffer::kOutput, 0, contiguous(face)};
    run("face of the last dim, packed, " + text(shape), type, {face, {packed, cells}},
        inside.items);
    if (type.dtype == Dtype::kUint8) continue;
    const CombineCells own{Buffer::kOutput, inside.offset, inside.strides};
    const CombineCells arrived{Buffer::kInput, 0, contiguous(face)};
    run("face of the last dim, added, " + text(shape), type, {face, {own, own, arrived}},
        inside.items);
  }
  if (type.dtype == Dtype::kUint8) return;
  for (const Shape& shape : shapes) {
    const Interior inside = interior(shape);
    const CombineCells own{Buffer::kOutput, 0, contiguous(shape)};
    const CombineCells padded{Buffer::kInput, inside.offset, inside.strides};
    run("adjoint of a halo (out += in), " + text(shape), type, {shape, {own, own, padded}},
        inside.items);
  }
}

}  // namespace

}  // namespace gpudist

int main(int count, char** arguments) {
  if (count != 2) return 2;
  gpudist::sampled_blocks = static_cast<uint32_t>(std::atoi(arguments[1]));
  for (const gpudist::Type& type : gpudist::kTypes) gpudist::run_cases(type);
  return 0;
}
