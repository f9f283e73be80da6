// Loading the table of GPU runtime calls.
#include <cstring>
#include <string>

#include "core/errors.h"
#include "device/device_api.h"
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
  CHECK(api.compiler_version(&version) == 0 && version >= 12000);
  CHECK(api.driver_version(&version) == 0);
  const int error = api.device_count(&devices);
  CHECK(error == 0 ? devices >= 0 : std::strlen(api.error_string(error)) > 0);
}

}  // namespace

void test_device_api() {
  refuses_libraries_without_a_table();
  finds_cuda_where_it_is_built();
}
