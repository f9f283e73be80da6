// A library whose device table has an unsupported version.
#include "device/device_api.h"

extern "C" const gpudist::DeviceApi* gpudist_device_api() {
  static gpudist::DeviceApi api{};
  return &api;
}
