// Describe the CUDA and NCCL of this build and this machine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "device/device_api.h"
#include "nccl/nccl_api.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::dict nccl_information(const std::string& path, const std::vector<std::string>& wheel_paths) {
  const gpudist::NcclApi& api = gpudist::load_nccl(path, wheel_paths);
  nb::dict information;
  information["path"] = api.path;
  information["found"] = api.found;
  information["version"] = api.version;
  information["has_windows"] = api.has_windows();
  information["has_shared_gpus"] = api.has_shared_gpus();
  return information;
}

nb::object cuda_information() {
  const gpudist::DeviceApi* api = gpudist::cuda_api();
  if (api == nullptr) return nb::none();
  int compiler_version = 0, driver_version = 0, device_count = 0;
  api->compiler_version(&compiler_version);
  api->driver_version(&driver_version);
  const int error = api->device_count(&device_count);
  nb::dict information;
  information["compiler_version"] = compiler_version;
  information["driver_version"] = driver_version;
  information["device_count"] = error == 0 ? device_count : 0;
  information["error"] = error == 0 ? "" : api->error_string(error);
  return information;
}

}  // namespace

namespace gpudist {

void bind_environment(nb::module_& m) {
  m.def("nccl_information", nccl_information, "path"_a, "wheel_paths"_a,
        "Open NCCL, unless it is open, and return its path, origin and features.");
  m.def(
      "cuda_information", cuda_information,
      "Versions of the kernels' compiler and of the driver, such as 12090 (0: there is none), how "
      "many devices there are and, if that cannot be told, why; None in a build without CUDA.");
}

}  // namespace gpudist
