// CUDA's runtime as nvcc's object of csrc/device/cuda_api.cu calls it: memory, streams and events
// are those of the table below it, and kernels are executed by the machine.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "device/device_api.h"
#include "machine.h"

namespace gpudist::ptx {

// What this runtime stands on: the doubles', or plain memory of the host. Whoever links it defines
// these.
const DeviceApi& device_below();
void put_on_stream(DeviceStream stream, std::function<void()> work);
// Live memory that is no allocation of this runtime's.
Range find_other_memory(uint64_t address);
// A launch found a fault, after which it did nothing more.
void report(const std::string& fault);

// How the launches from here on are carried out.
struct Manner {
  std::atomic<uint64_t> next{1};  // number of the next launch, of which its threads' order is made
  uint32_t block_stride = 1;
  uint64_t most_steps = 1 << 20;
  bool counts_warps = false;
};
Manner& manner();

// Of the file named in GPUDIST_PTX_PROGRAM.
std::vector<Kernel>& kernels();

// All launches so far, by kernel in the order of kernels(). Not while one is in flight.
std::vector<Counts>& counts();
void forget_counts();

}  // namespace gpudist::ptx
