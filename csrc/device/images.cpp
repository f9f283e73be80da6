#include "device/images.h"

namespace gpudist {

const Image* choose_image(const std::vector<Image>& images, const std::string& unit,
                          int capability) {
  const Image* chosen = nullptr;
  for (const Image& image : images) {
    const bool runs = image.capability <= capability &&
                      (image.is_ptx || image.capability / 10 == capability / 10);
    if (image.unit != unit || !runs) continue;
    const bool is_better =
        chosen == nullptr || (chosen->is_ptx && !image.is_ptx) ||
        (chosen->is_ptx == image.is_ptx && image.capability > chosen->capability);
    if (is_better) chosen = &image;
  }
  return chosen;
}

}  // namespace gpudist
