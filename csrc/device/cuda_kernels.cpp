#include "device/cuda_kernels.h"

#include <array>
#include <atomic>
#include <cstring>
#include <mutex>

#include "device/cuda_driver.h"
#include "device/images.h"
#include "device/kernel_list.h"

namespace gpudist {

namespace {

// Index of each kernel.
enum Kernel : int {
#define GPUDIST_INDEX(name, ...) k_##name,
  k_combine_kernel,
  GPUDIST_COMBINE_KERNELS(GPUDIST_INDEX) GPUDIST_RANDOM_KERNELS(GPUDIST_INDEX)
      GPUDIST_NORM_KERNELS(GPUDIST_INDEX) k_combine_kernel_of_many,
  kKernels
};

constexpr KernelName kNames[] = {
#define GPUDIST_COMBINE_NAME(name, ...) {"combine_kernels", #name},
#define GPUDIST_RANDOM_NAME(name, ...) {"random_cells", #name},
#define GPUDIST_NORM_NAME(name, ...) {"norm_kernels", #name},
    {"combine_kernels", "combine_kernel"},
    GPUDIST_COMBINE_KERNELS(GPUDIST_COMBINE_NAME) GPUDIST_RANDOM_KERNELS(GPUDIST_RANDOM_NAME)
        GPUDIST_NORM_KERNELS(GPUDIST_NORM_NAME){"combine_large", "combine_kernel_of_many"}};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == kKernels);

// The kernel of each body, and of each draw and format of cells.
template <class Body>
constexpr Kernel kNormKernel = Body::has_no_kernel;
template <Draw kDraw, class Cells>
constexpr Kernel kRandomKernel = Cells::has_no_kernel;
#define GPUDIST_NORM_INDEX(name, ...) \
  template <>                         \
  constexpr Kernel kNormKernel<__VA_ARGS__> = k_##name;
GPUDIST_NORM_KERNELS(GPUDIST_NORM_INDEX)
#define GPUDIST_RANDOM_INDEX(name, kDraw, Cells) \
  template <>                                    \
  constexpr Kernel kRandomKernel<kDraw, Cells> = k_##name;
GPUDIST_RANDOM_KERNELS(GPUDIST_RANDOM_INDEX)

using Functions = std::array<CudaFunction, kKernels>;

int find_functions(const CudaDriver& driver, int device, Functions* functions) {
  int capability = 0;
  if (const int error = capability_of(driver, device, &capability)) return error;
  const char* unit = "";
  CudaModule module = nullptr;
  const int count = most_inline_bytes() < kMany ? k_combine_kernel_of_many : kKernels;
  for (int kernel = 0; kernel < count; ++kernel) {
    if (std::strcmp(unit, kNames[kernel].unit) != 0) {
      unit = kNames[kernel].unit;
      const Image* const image = choose_image(images(), unit, capability);
      if (image == nullptr) return kCudaNoBinary;
      if (const int error = driver.module_load_data(&module, image->begin)) return error;
    }
    // The driver loads the kernel now: later it would wait for kernels in progress, or be part of a
    // capture.
    const int error =
        driver.module_get_function(&(*functions)[kernel], module, kNames[kernel].name);
    if (error != 0) return error;
  }
  return 0;
}

// The kernels on the current device, loaded at the first call.
int current_functions(const Functions** functions) {
  static std::array<std::atomic<const Functions*>, kMostDevices> loaded{};
  static std::mutex mutex;
  const CudaDriver& driver = cuda_driver();
  int device = 0;
  if (const int error = driver.ctx_get_device(&device)) return error;
  if (device < 0 || device >= kMostDevices) return kCudaInvalidDevice;
  *functions = loaded[device].load(std::memory_order_acquire);
  if (*functions != nullptr) return 0;
  const std::lock_guard<std::mutex> locked(mutex);
  *functions = loaded[device].load(std::memory_order_acquire);
  if (*functions != nullptr) return 0;
  // Never destroyed: threads may launch until the process ends.
  auto* const made = new Functions{};
  int mode = kRelaxedCapture;
  driver.thread_exchange_stream_capture_mode(&mode);
  const int error = find_functions(driver, device, made);
  driver.thread_exchange_stream_capture_mode(&mode);
  if (error != 0) {
    delete made;
    return error;
  }
  loaded[device].store(made, std::memory_order_release);
  *functions = made;
  return 0;
}

int launch(Kernel kernel, const void* parameter, uint32_t blocks, uint32_t threads,
           DeviceStream stream) {
  const Functions* functions = nullptr;
  if (const int error = current_functions(&functions)) return error;
  void* parameters[] = {const_cast<void*>(parameter)};  // only read
  return cuda_driver().launch_kernel((*functions)[kernel], blocks, 1, 1, threads, 1, 1, 0, stream,
                                     parameters, nullptr);
}

template <uint32_t kBytes>
int launch_inlined(Kernel kernel, const CombineArguments& arguments, DeviceStream stream) {
  Inlined<kBytes> inlined;
  inlined.arguments = arguments;
  inlined.views_offset = static_cast<uint32_t>(reinterpret_cast<const char*>(arguments.views) -
                                               reinterpret_cast<const char*>(arguments.jobs));
  std::memcpy(inlined.tables, arguments.jobs, arguments.inline_bytes);
  return launch(kernel, &inlined, arguments.blocks, CombineArguments::kThreads, stream);
}

}  // namespace

std::vector<KernelName> kernel_names() {
  return {std::begin(kNames), std::end(kNames)};
}

int load_kernels() {
  const Functions* functions = nullptr;
  return current_functions(&functions);
}

uint32_t most_inline_bytes() {
  static const uint32_t most = [] {
    int version = 0;
    return cuda_driver().driver_get_version(&version) == 0 && version >= 12010 ? kMany : kSome;
  }();
  return most;
}

int launch_combine(const CombineArguments& arguments, DeviceStream stream) {
  if (arguments.blocks == 0) return 0;
  if (arguments.inline_bytes == 0) {
    return launch(k_combine_kernel, &arguments, arguments.blocks, CombineArguments::kThreads,
                  stream);
  }
  if (arguments.inline_bytes <= kFew) {
    return launch_inlined<kFew>(k_combine_kernel_of_few, arguments, stream);
  }
  if (arguments.inline_bytes <= kSome) {
    return launch_inlined<kSome>(k_combine_kernel_of_some, arguments, stream);
  }
  return launch_inlined<kMany>(k_combine_kernel_of_many, arguments, stream);
}

int launch_random(const RandomArguments& arguments, DeviceStream stream) {
  const Kernel kernel = randomly::with_types(
      arguments.draw, arguments.dtype,
      [](auto draw, auto cells) { return kRandomKernel<decltype(draw)::value, decltype(cells)>; });
  return launch(kernel, &arguments, arguments.blocks, RandomArguments::kThreads, stream);
}

int launch_norm(const NormCall& call, DeviceStream stream) {
  const uint32_t blocks = norm_blocks(call);
  if (blocks == 0) return 0;
  const Kernel kernel =
      norming::visit_body(call, [](auto body) { return kNormKernel<decltype(body)>; });
  return launch(kernel, &call.arguments, blocks, NormArguments::kThreads, stream);
}

}  // namespace gpudist
