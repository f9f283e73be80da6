#include "device/cuda_driver.h"

#include <dlfcn.h>

namespace gpudist {

namespace {

template <typename... Arguments>
int absent(Arguments...) {
  return kCudaNoDriver;
}

// Looks up the calls of the library; those that are missing fail when they are called.
class Calls {
 public:
  // Never closed, because the driver has threads.
  Calls() : library_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) missing_ = dlerror();
  }

  template <typename... Arguments>
  void find(int (*&call)(Arguments...), const char* symbol) {
    void* const address = library_ == nullptr ? nullptr : dlsym(library_, symbol);
    call = reinterpret_cast<int (*)(Arguments...)>(address);
    if (address != nullptr) return;
    call = absent;
    if (missing_.empty()) missing_ = std::string("libcuda.so.1 has no ") + symbol;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

CudaDriver find_driver() {
  Calls calls;
  CudaDriver driver{};
#define GPUDIST_FIND(call, symbol, arguments) calls.find(driver.call, #symbol);
  GPUDIST_CUDA_CALLS(GPUDIST_FIND)
  driver.missing = calls.missing();
  // Another call returns the same error.
  driver.init(0);
  return driver;
}

}  // namespace

int capability_of(const CudaDriver& driver, int device, int* capability) {
  int major = 0, minor = 0;
  int error = driver.device_get_attribute(&major, kCudaCapabilityMajor, device);
  if (error == 0) error = driver.device_get_attribute(&minor, kCudaCapabilityMinor, device);
  *capability = 10 * major + minor;
  return error;
}

const CudaDriver& cuda_driver() {
  static const CudaDriver driver = find_driver();
  return driver;
}

}  // namespace gpudist
