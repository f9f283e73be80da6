#include "device/device_api.h"

#include <dlfcn.h>

#include <string>

#include "core/errors.h"

namespace gpudist {

namespace {

using MakeApi = const DeviceApi*();

std::string last_dl_error() {
  const char* text = dlerror();
  return text == nullptr ? "" : text;
}

const DeviceApi& exported_api(const char* library) {
  // Never closed, because the table is in the library.
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw NotBuiltError("the test double: " + last_dl_error());
  auto* const make = reinterpret_cast<MakeApi*>(dlsym(handle, "gpudist_device_api"));
  if (make == nullptr) throw NotBuiltError("the test double: " + last_dl_error());
  const DeviceApi* const api = make();
  if (api == nullptr || api->abi != DeviceApi::kAbi) {
    const std::string abi = api == nullptr ? "none" : std::to_string(api->abi);
    throw NotBuiltError(std::string(library) + " exports a table of version " + abi + ", where " +
                        std::to_string(DeviceApi::kAbi) + " is needed: build it again");
  }
  return *api;
}

}  // namespace

const DeviceApi& device_api(const char* library) {
  if (library != nullptr && *library != '\0') return exported_api(library);
  const DeviceApi* const api = cuda_api();
  if (api == nullptr) {
    throw NotBuiltError(
        "this installation of gpudist was built without CUDA; put nvcc of the CUDA toolkit (12.1 "
        "or later) into PATH, or name its folder in CUDA_HOME, then install gpudist again, which "
        "keeps your torch: GPUDIST_CUDA=on pip install --force-reinstall --no-deps --no-cache-dir "
        "gpudist");
  }
  return *api;
}

}  // namespace gpudist
