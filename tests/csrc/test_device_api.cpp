// Loading the table of GPU runtime calls.
#include <cstring>
#include <string>
#include <string_view>

#include "core/errors.h"
#include "device/cuda_driver.h"
#include "device/cuda_kernels.h"
#include "device/device_api.h"
#include "device/images.h"
#include "test.h"

namespace {

using namespace gpudist;

// Message of the error for a library without a usable table.
std::string refusal(const char* library) {
  try {
    device_api(library);
  } catch (const NotBuiltError& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void refuses_libraries_without_a_table() {
  CHECK(has(refusal("/nowhere/libdouble.so"), "/nowhere/libdouble.so"));
  CHECK(has(refusal("libm.so.6"), "gpudist_device_api"));
  CHECK(has(refusal(GPUDIST_OLD_TABLE),
            "a table of version 0, where " + std::to_string(DeviceApi::kAbi) + " is needed"));
}

// CUDA's table exists without a GPU too; only its calls fail.
void finds_cuda_where_it_is_built() {
  if (cuda_api() == nullptr) {
    CHECK(has(refusal(""), "GPUDIST_CUDA=on"));
    return;
  }
  const DeviceApi& api = device_api("");
  CHECK(&api == cuda_api());
  CHECK(api.abi == DeviceApi::kAbi);
  CHECK(std::strcmp(api.name, "cuda") == 0);
  int version = 0, devices = -1;
  CHECK(api.compiler_version(&version) == 0 && version >= 12010);
  CHECK(api.driver_version(&version) == 0);
  const int error = api.device_count(&devices);
  CHECK(error == 0 ? devices >= 0 : std::strlen(api.error_string(error)) > 0);
}

// Machine code runs within a major version; PTX runs wherever there is none.
void chooses_an_image() {
  const std::vector<Image> images = {
      {"a", 80, false, "sm_80", nullptr},        {"a", 86, false, "sm_86", nullptr},
      {"b", 89, false, "another unit", nullptr}, {"a", 80, true, "compute_80", nullptr},
      {"a", 90, true, "compute_90", nullptr},    {"a", 100, false, "sm_100", nullptr}};
  const auto chosen = [&](int capability) -> std::string {
    const Image* const image = choose_image(images, "a", capability);
    return image == nullptr ? "none" : image->begin;
  };
  CHECK(chosen(75) == "none");
  CHECK(chosen(80) == "sm_80");
  CHECK(chosen(89) == "sm_86");
  CHECK(chosen(90) == "compute_90");
  CHECK(chosen(103) == "sm_100");
  CHECK(chosen(110) == "compute_90");
  CHECK(choose_image(images, "c", 90) == nullptr);
}

// The driver finds kernels by their names alone.
void has_every_kernel_in_every_image() {
  for (const Image& image : images()) {
    const std::string_view code(image.begin, static_cast<size_t>(image.end - image.begin));
    for (const KernelName& kernel : kernel_names()) {
      if (kernel.unit != image.unit) continue;
      const std::string begin = image.is_ptx ? ".entry " : ".text.";
      const std::string end = image.is_ptx ? "(" : std::string(1, '\0');
      CHECK(code.find(begin + kernel.name + end) != std::string_view::npos);
    }
  }
  for (const KernelName& kernel : kernel_names()) {
    CHECK(images().empty() || choose_image(images(), kernel.unit, 90) != nullptr);
  }
}

// Every call can be made without a driver, and its error says what is missing.
void tells_that_there_is_no_driver() {
  const CudaDriver& driver = cuda_driver();
  if (driver.missing.empty()) return;
  CHECK(has(driver.missing, "libcuda.so.1"));
  CHECK(driver.init(0) == kCudaNoDriver);
  CHECK(driver.launch_kernel(nullptr, 1, 1, 1, 1, 1, 1, 0, nullptr, nullptr, nullptr) ==
        kCudaNoDriver);
  CHECK(load_kernels() == kCudaNoDriver);
}

}  // namespace

void test_device_api() {
  chooses_an_image();
  has_every_kernel_in_every_image();
  tells_that_there_is_no_driver();
  refuses_libraries_without_a_table();
  finds_cuda_where_it_is_built();
}
