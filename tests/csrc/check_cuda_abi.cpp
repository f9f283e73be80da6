// Compiled but never run: compares our declarations of the CUDA driver with a real cuda.h. With
// this macro it declares older versions of functions too, and no name is another one's.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include <type_traits>

#include "device/cuda_driver.h"
#include "device/device_api.h"

namespace {

using gpudist::CudaDriver;

// Enumerations are declared as int, and handles as void*, so that arguments agree in size and in
// whether they are pointers; what they point to agrees too.
template <class Theirs, class Ours>
constexpr bool same() {
  if (std::is_pointer_v<Theirs> != std::is_pointer_v<Ours>) return false;
  using Target = std::remove_pointer_t<Ours>;
  if constexpr (std::is_pointer_v<Ours> && !std::is_void_v<Target>) {
    return same<std::remove_pointer_t<Theirs>, Target>();
  }
  return sizeof(Theirs) == sizeof(Ours);
}

template <class... Theirs, class... Ours>
constexpr bool same_call(CUresult (*)(Theirs...), int (*)(Ours...)) {
  if constexpr (sizeof...(Theirs) == sizeof...(Ours)) return (same<Theirs, Ours>() && ...);
  return false;
}

#define SAME_CALL(call, symbol, arguments) \
  static_assert(same_call(decltype (&::symbol)(nullptr), decltype(CudaDriver::call)(nullptr)));
GPUDIST_CUDA_CALLS(SAME_CALL)

#define SAME_VALUE(ours, theirs) \
  static_assert(static_cast<int>(gpudist::ours) == static_cast<int>(theirs))

SAME_VALUE(kCudaInvalidDevice, CUDA_ERROR_INVALID_DEVICE);
SAME_VALUE(kCudaNoBinary, CUDA_ERROR_NO_BINARY_FOR_GPU);
SAME_VALUE(kCudaNewerPtx, CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
SAME_VALUE(kCudaNotFound, CUDA_ERROR_NOT_FOUND);
SAME_VALUE(kCudaNotReady, CUDA_ERROR_NOT_READY);
SAME_VALUE(kCudaMultiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME_VALUE(kCudaCapabilityMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME_VALUE(kCudaCapabilityMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME_VALUE(kCudaHostPortable, CU_MEMHOSTALLOC_PORTABLE);
SAME_VALUE(kCudaHostMapped, CU_MEMHOSTALLOC_DEVICEMAP);
SAME_VALUE(kCudaNonBlocking, CU_STREAM_NON_BLOCKING);
SAME_VALUE(kCudaWithoutTiming, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(kCudaNoCapture, CU_STREAM_CAPTURE_STATUS_NONE);
SAME_VALUE(kRelaxedCapture, CU_STREAM_CAPTURE_MODE_RELAXED);

}  // namespace
