#include "runtime.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

namespace gpudist::ptx {

namespace {

constexpr int kCapability = GPUDIST_PTX_CAPABILITY;

// Live allocations.
struct Memory {
  std::mutex mutex;
  std::map<uint64_t, Range> ranges;  // by end
};

Memory& memory() {
  static Memory& memory = *new Memory;
  return memory;
}

std::mutex& counts_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

std::vector<Counts> no_counts() {
  std::vector<Counts> made;
  for (const Kernel& kernel : kernels()) {
    const std::vector<uint64_t> none(kernel.instructions.size());
    made.push_back({none, none});
  }
  return made;
}

// Kernel names, by address of the stub that nvcc generates.
std::map<const void*, std::string>& names_of_stubs() {
  static auto& names = *new std::map<const void*, std::string>;
  return names;
}

const Kernel* find_kernel(const void* stub) {
  const auto found = names_of_stubs().find(stub);
  if (found == names_of_stubs().end()) return nullptr;
  for (const Kernel& kernel : kernels()) {
    if (kernel.name == found->second) return &kernel;
  }
  return nullptr;
}

bool is_kernel(const void* stub) {
  return names_of_stubs().count(stub) != 0;
}

// Load a kernel; returns whether it had been loaded before.
bool load(const void* stub) {
  static auto& loaded = *new std::set<const void*>;
  const std::lock_guard<std::mutex> locked(memory().mutex);
  return !loaded.insert(stub).second;
}

Range find_memory(uint64_t address) {
  {
    const std::lock_guard<std::mutex> locked(memory().mutex);
    const auto found = memory().ranges.upper_bound(address);
    if (found != memory().ranges.end() && found->second.begin <= address) return found->second;
  }
  return find_other_memory(address);
}

int allocated(int error, void** made, size_t bytes, const char* kind) {
  if (error != 0 || bytes == 0) return error;
  const auto begin = reinterpret_cast<uint64_t>(*made);
  const std::lock_guard<std::mutex> locked(memory().mutex);
  memory().ranges[begin + bytes] = {begin, begin + bytes, kind};
  ++memory_changes();
  return error;
}

void released(void* ended) {
  const auto begin = reinterpret_cast<uint64_t>(ended);
  const std::lock_guard<std::mutex> locked(memory().mutex);
  const auto found = memory().ranges.upper_bound(begin);
  if (found != memory().ranges.end() && found->second.begin == begin) {
    memory().ranges.erase(found);
    ++memory_changes();
  }
}

// In every third launch, the threads of blocks alternate.
void carry_out(const Kernel& kernel, const void* parameter, dim3 grid, dim3 threads,
               uint64_t number) {
  Launch launch;
  launch.kernel = &kernel;
  launch.parameter = parameter;
  launch.blocks = grid.x;
  launch.threads = threads.x;
  launch.seed = number;
  launch.takes_turns = number % 3 == 0 && !manner().counts_warps;
  launch.blocks_at_once = launch.takes_turns ? 1 + number / 3 % 4 : 1;
  launch.block_stride = manner().block_stride;
  launch.most_steps = manner().most_steps;
  Counts executed;
  if (manner().counts_warps) executed.warps.resize(kernel.instructions.size());
  try {
    execute(launch, find_memory, executed);
  } catch (const Fault& fault) {
    report(fault.text);
  }
  const std::lock_guard<std::mutex> locked(counts_mutex());
  Counts& all = counts()[static_cast<size_t>(&kernel - kernels().data())];
  for (size_t i = 0; i < executed.threads.size(); ++i) all.threads[i] += executed.threads[i];
  for (size_t i = 0; i < executed.warps.size(); ++i) all.warps[i] += executed.warps[i];
}

}  // namespace

Manner& manner() {
  static Manner manner;
  return manner;
}

std::vector<Kernel>& kernels() {
  static auto& kernels = *new std::vector<Kernel>([] {
    const char* const path = std::getenv("GPUDIST_PTX_PROGRAM");
    if (path == nullptr) throw std::runtime_error("GPUDIST_PTX_PROGRAM names no program");
    return read_program(path);
  }());
  return kernels;
}

std::vector<Counts>& counts() {
  static auto& counts = *new std::vector<Counts>(no_counts());
  return counts;
}

void forget_counts() {
  counts() = no_counts();
}

}  // namespace gpudist::ptx

using gpudist::ptx::device_below;

// Functions called by the initialization code that nvcc generates.
extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  gpudist::ptx::names_of_stubs()[stub] = name;
}
// Required by nvcc's stubs, which are never called.
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t) {
  std::abort();
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) {
  std::abort();
}
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) {
  std::abort();
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  std::abort();
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return device_below().error_string(error);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  return static_cast<cudaError_t>(device_below().device_count(count));
}
cudaError_t cudaGetDevice(int* device) {
  return static_cast<cudaError_t>(device_below().get_device(device));
}
cudaError_t cudaSetDevice(int device) {
  return static_cast<cudaError_t>(device_below().set_device(device));
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = gpudist::ptx::kCapability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = gpudist::ptx::kCapability % 10;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      return static_cast<cudaError_t>(device_below().multiprocessors(0, value));
    default: return cudaErrorInvalidValue;
  }
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* stub) {
  *attributes = {};
  // A program has the PTX of some files only.
  if (!gpudist::ptx::is_kernel(stub)) return cudaErrorInvalidDeviceFunction;
  gpudist::ptx::load(stub);
  return static_cast<cudaError_t>(device_below().check_kernels());
}

cudaError_t cudaMalloc(void** made, size_t bytes) {
  const int error = device_below().allocate(made, bytes);
  return static_cast<cudaError_t>(gpudist::ptx::allocated(error, made, bytes, "device memory"));
}
cudaError_t cudaHostAlloc(void** made, size_t bytes, unsigned) {
  const int error = device_below().allocate_pinned(made, bytes);
  return static_cast<cudaError_t>(gpudist::ptx::allocated(error, made, bytes, "pinned memory"));
}
// Forget the memory before its addresses can be reused.
cudaError_t cudaFree(void* memory) {
  gpudist::ptx::released(memory);
  return static_cast<cudaError_t>(device_below().release(memory));
}
cudaError_t cudaFreeHost(void* memory) {
  gpudist::ptx::released(memory);
  return static_cast<cudaError_t>(device_below().release_pinned(memory));
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return static_cast<cudaError_t>(device_below().copy(to, from, bytes, stream));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return static_cast<cudaError_t>(
      device_below().create_stream(reinterpret_cast<gpudist::DeviceStream*>(stream)));
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return static_cast<cudaError_t>(device_below().destroy_stream(stream));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return static_cast<cudaError_t>(
      device_below().create_event(reinterpret_cast<gpudist::DeviceEvent*>(event)));
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return static_cast<cudaError_t>(device_below().destroy_event(event));
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return static_cast<cudaError_t>(device_below().record_event(event, stream));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  bool is_complete = false;
  const int error = device_below().query_event(event, &is_complete);
  if (error != 0) return static_cast<cudaError_t>(error);
  return is_complete ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return static_cast<cudaError_t>(device_below().wait_event(stream, event));
}
#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t*,
                                        const cudaGraphNode_t**, size_t*) {
#endif
  uint64_t capture = 0;
  const int error = device_below().capture_id(stream, &capture);
  *status = capture == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = capture;
  return static_cast<cudaError_t>(error);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  int exchanged = *mode;
  const int error = device_below().exchange_capture_mode(&exchanged);
  *mode = static_cast<cudaStreamCaptureMode>(exchanged);
  return static_cast<cudaError_t>(error);
}

cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** parameters,
                             size_t shared_bytes, cudaStream_t stream) {
  constexpr uint32_t kMostThreads = 1024;
  const gpudist::ptx::Kernel* const kernel = gpudist::ptx::find_kernel(stub);
  if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
  const bool fits = grid.x > 0 && grid.x < 1u << 31 && grid.y == 1 && grid.z == 1 && block.x > 0 &&
                    block.x <= kMostThreads && block.y == 1 && block.z == 1 && shared_bytes == 0;
  if (!fits) return cudaErrorInvalidConfiguration;
  // CUDA would load it now, beside running kernels or inside a capture.
  if (!gpudist::ptx::load(stub))
    gpudist::ptx::report("not loaded before its launch: " + kernel->name);
  // The table below refuses a stream just as for a launch of its own.
  if (const int error = device_below().launch_combine({}, stream)) {
    return static_cast<cudaError_t>(error);
  }
  // Copy the parameter to an address aligned as in hardware.
  constexpr size_t kAlignment = 256;
  const size_t rounded = (kernel->parameter_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::shared_ptr<void> parameter(std::aligned_alloc(kAlignment, rounded), std::free);
  std::memcpy(parameter.get(), parameters[0], kernel->parameter_bytes);
  const uint64_t number = gpudist::ptx::manner().next++;
  gpudist::ptx::put_on_stream(
      stream, [=] { gpudist::ptx::carry_out(*kernel, parameter.get(), grid, block, number); });
  return cudaSuccess;
}

}  // extern "C"
