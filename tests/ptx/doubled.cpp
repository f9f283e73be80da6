// The library that stands in for CUDA's runtime and NCCL: the doubles, with nvcc's object of
// csrc/device/cuda_api.cu between them and the native core, so that what it launches is executed.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "heap.h"
#include "hooks.h"
#include "runtime.h"
#include "stream_double.h"

// The doubles' own table, under another name in this library.
extern "C" const gpudist::DeviceApi* gpudist_double_device_api();

namespace gpudist {

namespace ptx {

namespace {

// A line for whoever has started this process.
void append(const char* variable, const std::string& line) {
  const char* const path = std::getenv(variable);
  if (path == nullptr) return;
  if (std::FILE* const file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", line.c_str());
    std::fclose(file);
  }
}

// When the process ends: which instructions it has executed.
struct Ending {
  ~Ending() {
    if (manner().next == 1) return;
    for (size_t k = 0; k < kernels().size(); ++k) {
      std::string line = kernels()[k].name;
      for (uint64_t times : counts()[k].threads) line += " " + std::to_string(times);
      append("GPUDIST_PTX_COUNTS", line);
    }
  }
} ending;

}  // namespace

const DeviceApi& device_below() {
  return *gpudist_double_device_api();
}

void put_on_stream(DeviceStream stream, std::function<void()> work) {
  doubles::enqueue(stream, std::move(work));
}

// Tensors: heap.cpp knows where they are.
Range find_other_memory(uint64_t address) {
  static auto* const find =
      reinterpret_cast<decltype(&gpudist_heap_find)>(dlsym(RTLD_DEFAULT, "gpudist_heap_find"));
  if (find == nullptr) {
    throw Fault{"memory of tensors is not known: heap.cpp's library is not in LD_PRELOAD"};
  }
  Range range{0, 0, "memory of the host"};
  find(address, &range.begin, &range.end);
  return range;
}

void report(const std::string& fault) {
  std::fprintf(stderr, "%s\n", fault.c_str());
  append("GPUDIST_PTX_FAULTS", fault);
  doubles::log_violation(fault);
}

}  // namespace ptx

}  // namespace gpudist

namespace gpudist {
const DeviceApi* cuda_api();
}

GPUDIST_EXPORT const gpudist::DeviceApi* gpudist_device_api() {
  return gpudist::cuda_api();
}
