// Takes the place of the embedded kernels in builds without CUDA.
#include "device/images.h"

namespace gpudist {

const int kCodeVersion = 0;

const std::vector<Image>& images() {
  static const std::vector<Image> none;
  return none;
}

}  // namespace gpudist
