#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>

#include "device/cuda_driver.h"
#include "device_double.h"
#include "hooks.h"

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
    made.push_back({none, none, 0});
  }
  return made;
}

// Contexts, their devices, and whether kernels have been launched there.
struct Context {
  int device = 0;
  bool has_launched = false;
};

std::map<DeviceContext, Context>& contexts() {
  static auto& contexts = *new std::map<DeviceContext, Context>;
  return contexts;
}

Context& current() {
  DeviceContext context = nullptr;
  device_below().get_context(&context);
  return contexts()[context];
}

const Kernel* find_kernel(const std::string& name) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.name == name) return &kernel;
  }
  return nullptr;
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
void carry_out(const Kernel& kernel, const void* parameter, uint32_t blocks, uint32_t threads,
               uint64_t number) {
  Launch launch;
  launch.kernel = &kernel;
  launch.parameter = parameter;
  launch.blocks = blocks;
  launch.threads = threads;
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
  all.rounded += executed.rounded;
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

using namespace gpudist;
using namespace gpudist::ptx;
using doubles::kSuccess;

// The functions of libcuda that the native core looks up.

GPUDIST_EXPORT int cuInit(unsigned) {
  return kSuccess;
}
GPUDIST_EXPORT int cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
GPUDIST_EXPORT int cuGetErrorString(int error, const char** text) {
  *text = device_below().error_string(error);
  return kSuccess;
}
GPUDIST_EXPORT int cuDeviceGetCount(int* count) {
  return device_below().device_count(count);
}
GPUDIST_EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
GPUDIST_EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case kCudaMultiprocessors: return device_below().multiprocessors(device, value);
    case kCudaCapabilityMajor: *value = kCapability / 10; return kSuccess;
    case kCudaCapabilityMinor: *value = kCapability % 10; return kSuccess;
    default: return doubles::kInvalidValue;
  }
}

GPUDIST_EXPORT int cuDevicePrimaryCtxRetain(DeviceContext* context, int device) {
  const int error = device_below().context_of(device, context);
  const std::lock_guard<std::mutex> locked(memory().mutex);
  if (error == 0) contexts()[*context].device = device;
  return error;
}
GPUDIST_EXPORT int cuCtxGetCurrent(DeviceContext* context) {
  return device_below().get_context(context);
}
GPUDIST_EXPORT int cuCtxSetCurrent(DeviceContext context) {
  return device_below().set_context(context);
}
GPUDIST_EXPORT int cuCtxGetDevice(int* device) {
  DeviceContext context = nullptr;
  device_below().get_context(&context);
  if (context == nullptr) return doubles::kInvalidContext;
  const std::lock_guard<std::mutex> locked(memory().mutex);
  *device = contexts()[context].device;
  return kSuccess;
}
GPUDIST_EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return kSuccess;
}

GPUDIST_EXPORT int cuMemAlloc_v2(CudaAddress* made, size_t bytes) {
  if (bytes == 0) return doubles::kInvalidValue;
  auto** const memory = reinterpret_cast<void**>(made);
  return allocated(device_below().allocate(memory, bytes), memory, bytes, "device memory");
}
GPUDIST_EXPORT int cuMemHostAlloc(void** made, size_t bytes, unsigned) {
  if (bytes == 0) return doubles::kInvalidValue;
  return allocated(device_below().allocate_pinned(made, bytes), made, bytes, "pinned memory");
}
// Forget the memory before its addresses can be reused.
GPUDIST_EXPORT int cuMemFree_v2(CudaAddress address) {
  auto* const memory = reinterpret_cast<void*>(address);
  released(memory);
  return device_below().release(memory);
}
GPUDIST_EXPORT int cuMemFreeHost(void* memory) {
  released(memory);
  return device_below().release_pinned(memory);
}
GPUDIST_EXPORT int cuMemcpyAsync(CudaAddress to, CudaAddress from, size_t bytes,
                                 DeviceStream stream) {
  return device_below().copy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from),
                             bytes, stream);
}

GPUDIST_EXPORT int cuStreamCreateWithPriority(DeviceStream* stream, unsigned, int) {
  return device_below().create_stream(stream);
}
GPUDIST_EXPORT int cuStreamDestroy_v2(DeviceStream stream) {
  return device_below().destroy_stream(stream);
}
GPUDIST_EXPORT int cuStreamWaitEvent(DeviceStream stream, DeviceEvent event, unsigned) {
  return device_below().wait_event(stream, event);
}
GPUDIST_EXPORT int cuStreamGetCaptureInfo_v2(DeviceStream stream, int* status, uint64_t* id, void**,
                                             const void**, size_t*) {
  const int error = device_below().capture_id(stream, id);
  *status = *id == 0 ? kCudaNoCapture : kCudaNoCapture + 1;
  return error;
}
GPUDIST_EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  return device_below().exchange_capture_mode == nullptr
             ? kSuccess
             : device_below().exchange_capture_mode(mode);
}
GPUDIST_EXPORT int cuEventCreate(DeviceEvent* event, unsigned) {
  return device_below().create_event(event);
}
GPUDIST_EXPORT int cuEventDestroy_v2(DeviceEvent event) {
  return device_below().destroy_event(event);
}
GPUDIST_EXPORT int cuEventRecord(DeviceEvent event, DeviceStream stream) {
  return device_below().record_event(event, stream);
}
GPUDIST_EXPORT int cuEventQuery(DeviceEvent event) {
  bool is_complete = false;
  const int error = device_below().query_event(event, &is_complete);
  return error != 0 ? error : is_complete ? kSuccess : kCudaNotReady;
}

// A module is the text of its PTX; a function is its name.
GPUDIST_EXPORT int cuModuleLoadData(CudaModule* module, const char* text) {
  if (const int error = device_below().check_kernels()) return error;
  const std::lock_guard<std::mutex> locked(memory().mutex);
  // The driver would load them beside running kernels, or inside a capture.
  if (current().has_launched) report("kernels are loaded after the first launch");
  *module = new std::string(text);
  return kSuccess;
}
GPUDIST_EXPORT int cuModuleGetFunction(CudaFunction* function, CudaModule module,
                                       const char* name) {
  const std::string entry = std::string(".entry ") + name + "(";
  if (static_cast<std::string*>(module)->find(entry) == std::string::npos) return kCudaNotFound;
  *function = new std::string(name);
  return kSuccess;
}
GPUDIST_EXPORT int cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y,
                                  unsigned grid_z, unsigned block_x, unsigned block_y,
                                  unsigned block_z, unsigned shared_bytes, DeviceStream stream,
                                  void** parameters, void** extra) {
  constexpr uint32_t kMostThreads = 1024;
  // A program has the PTX of some files only.
  const Kernel* const kernel =
      function == nullptr ? nullptr : find_kernel(*static_cast<std::string*>(function));
  const bool fits = kernel != nullptr && grid_x > 0 && grid_x < 1u << 31 && grid_y == 1 &&
                    grid_z == 1 && block_x > 0 && block_x <= kMostThreads && block_y == 1 &&
                    block_z == 1 && shared_bytes == 0 && extra == nullptr;
  if (!fits) return doubles::kInvalidValue;
  // The table below refuses a stream just as for a launch of its own.
  if (const int error = device_below().launch_combine({}, stream)) return error;
  {
    const std::lock_guard<std::mutex> locked(memory().mutex);
    current().has_launched = true;
  }
  // Copy the parameter to an address aligned as in hardware.
  constexpr size_t kAlignment = 256;
  const size_t rounded = (kernel->parameter_bytes + kAlignment - 1) / kAlignment * kAlignment;
  const std::shared_ptr<void> parameter(std::aligned_alloc(kAlignment, rounded), std::free);
  std::memcpy(parameter.get(), parameters[0], kernel->parameter_bytes);
  const uint64_t number = manner().next++;
  put_on_stream(stream, [=] { carry_out(*kernel, parameter.get(), grid_x, block_x, number); });
  return kSuccess;
}
