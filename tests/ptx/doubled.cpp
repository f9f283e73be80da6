// Library that replaces the CUDA driver and NCCL: the doubles, combined with csrc/device and nvcc's
// PTX of its kernels, which are executed.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "heap.h"
#include "hooks.h"
#include "runtime.h"
#include "stream_double.h"

// The doubles' own table, which has another name in this library.
extern "C" const gpudist::DeviceApi* gpudist_double_device_api();

namespace gpudist {

namespace ptx {

namespace {

// Append a line to the file named by an environment variable.
void append(const char* variable, const std::string& line) {
  const char* const path = std::getenv(variable);
  if (path == nullptr) return;
  if (std::FILE* const file = std::fopen(path, "a")) {
    std::fprintf(file, "%s\n", line.c_str());
    std::fclose(file);
  }
}

// Report the executed instructions when the process exits.
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

// Memory of tensors, which heap.cpp records.
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
