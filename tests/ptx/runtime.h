// A double of libcuda, for csrc/device/cuda_driver.cpp. Memory, streams and events come from the
// table below; kernels run in the interpreter.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "device/device_api.h"
#include "machine.h"

namespace gpudist::ptx {

// Table that this driver is built on: the doubles', or host memory. The program that links this
// file defines these functions.
const DeviceApi& device_below();
void put_on_stream(DeviceStream stream, std::function<void()> work);
// Live memory that this driver did not allocate.
Range find_other_memory(uint64_t address);
// A launch found an error and stopped.
void report(const std::string& fault);

// Options of the following launches.
struct Manner {
  std::atomic<uint64_t> next{1};  // number of the next launch, which seeds the order of its threads
  uint32_t block_stride = 1;
  uint64_t most_steps = 1 << 20;
  bool counts_warps = false;
};
Manner& manner();

// Kernels of the file named in GPUDIST_PTX_PROGRAM.
std::vector<Kernel>& kernels();

// Counts of all launches so far, in the order of kernels(). Do not call during a launch.
std::vector<Counts>& counts();
void forget_counts();

}  // namespace gpudist::ptx
