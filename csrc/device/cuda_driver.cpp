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
  calls.find(driver.init, "cuInit");
  calls.find(driver.driver_get_version, "cuDriverGetVersion");
  calls.find(driver.get_error_string, "cuGetErrorString");
  calls.find(driver.device_get_count, "cuDeviceGetCount");
  calls.find(driver.device_get, "cuDeviceGet");
  calls.find(driver.device_get_attribute, "cuDeviceGetAttribute");
  calls.find(driver.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  calls.find(driver.ctx_get_current, "cuCtxGetCurrent");
  calls.find(driver.ctx_set_current, "cuCtxSetCurrent");
  calls.find(driver.ctx_get_device, "cuCtxGetDevice");
  calls.find(driver.ctx_get_stream_priority_range, "cuCtxGetStreamPriorityRange");
  calls.find(driver.mem_alloc, "cuMemAlloc_v2");
  calls.find(driver.mem_free, "cuMemFree_v2");
  calls.find(driver.mem_host_alloc, "cuMemHostAlloc");
  calls.find(driver.mem_free_host, "cuMemFreeHost");
  calls.find(driver.memcpy_async, "cuMemcpyAsync");
  calls.find(driver.stream_create_with_priority, "cuStreamCreateWithPriority");
  calls.find(driver.stream_destroy, "cuStreamDestroy_v2");
  calls.find(driver.stream_wait_event, "cuStreamWaitEvent");
  calls.find(driver.stream_get_capture_info, "cuStreamGetCaptureInfo_v2");
  calls.find(driver.thread_exchange_stream_capture_mode, "cuThreadExchangeStreamCaptureMode");
  calls.find(driver.event_create, "cuEventCreate");
  calls.find(driver.event_destroy, "cuEventDestroy_v2");
  calls.find(driver.event_record, "cuEventRecord");
  calls.find(driver.event_query, "cuEventQuery");
  calls.find(driver.module_load_data, "cuModuleLoadData");
  calls.find(driver.module_get_function, "cuModuleGetFunction");
  calls.find(driver.launch_kernel, "cuLaunchKernel");
  driver.missing = calls.missing();
  // Its error is that of every call that follows.
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
