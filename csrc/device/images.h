// The compiled kernels in this library, in a source that cmake/device_code.py writes. There are
// none in a build without CUDA.
#pragma once

#include <string>
#include <vector>

namespace gpudist {

// One source of kernels, compiled for one architecture.
struct Image {
  std::string unit;
  int capability;  // such as 90
  bool is_ptx;     // with a zero byte at its end
  const char* begin;
  const char* end;
};

const std::vector<Image>& images();

// Version of the CUDA compiler, such as 12090. Drivers for its major version accept its machine
// code; only those for this version or a later one accept its PTX.
extern const int kCodeVersion;

// The image of a unit for a GPU: machine code runs on its capability and on later ones of the same
// major version, and a driver compiles PTX for any later one. Null if there is none.
const Image* choose_image(const std::vector<Image>& images, const std::string& unit,
                          int capability);

}  // namespace gpudist
