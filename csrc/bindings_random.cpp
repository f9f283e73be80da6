// Python binding to draw the random numbers of a block. An address of 0 stands for no tensor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "core/random_cells.h"
#include "device/device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gpudist {

namespace {

using Numbers = std::vector<int64_t>;

constexpr int kHost = -1;

const uint64_t* at(uintptr_t address) {
  return reinterpret_cast<const uint64_t*>(address);
}

// Indices of the cells of a block in the global tensor of `shape`. Cells that differ only in dims
// beyond those of `shape` have the same index.
void set_indices(RandomCells& cells, const Numbers& start, const Numbers& shape) {
  cells.index_strides.assign(cells.shape.size(), 0);
  uint64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    cells.index_strides[d] = stride;
    cells.index += static_cast<uint64_t>(start[d]) * stride;
    stride *= static_cast<uint64_t>(shape[d]);
  }
}

void draw(Draw draw, Dtype dtype, Numbers block, const Numbers& start, const Numbers& shape,
          Numbers input_strides, Numbers output_strides, uintptr_t input, uintptr_t output,
          uintptr_t seed, uintptr_t call, uintptr_t stored_key, uint64_t number,
          uintptr_t stores_key, int64_t dropped_below, double factor, int device,
          uintptr_t stream) {
  const nb::gil_scoped_release release;
  RandomCells cells;
  cells.draw = draw;
  cells.dtype = dtype;
  cells.shape = std::move(block);
  cells.input_strides = std::move(input_strides);
  cells.output_strides = std::move(output_strides);
  set_indices(cells, start, shape);
  cells.key = {at(seed), at(call), at(stored_key), number};
  cells.dropped_below = dropped_below;
  cells.factor = factor;
  cells.input = reinterpret_cast<const char*>(input);
  cells.output = reinterpret_cast<char*>(output);
  cells.stores_key = reinterpret_cast<uint64_t*>(stores_key);
  const std::vector<RandomArguments> launches = cells.launches();
  if (device == kHost) {
    for (const RandomArguments& launch : launches) draw_on_host(launch);
    return;
  }
  const DeviceApi& api = device_api("");
  const DeviceGuard guard(api, device);
  for (const RandomArguments& launch : launches) {
    check_device(api, api.launch_random(launch, reinterpret_cast<DeviceStream>(stream)),
                 "drawing random numbers");
  }
}

}  // namespace

void bind_random(nb::module_& m) {
  nb::enum_<Draw>(m, "Draw", "What is drawn for each cell.")
      .value("kept", Draw::kKept)
      .value("uniform", Draw::kUniform)
      .value("normal", Draw::kNormal)
      .value("bernoulli", Draw::kBernoulli)
      .value("scaled", Draw::kScaled);
  m.def("draw", draw, "draw"_a, "dtype"_a, "block"_a, "start"_a, "shape"_a, "input_strides"_a,
        "output_strides"_a, "input"_a, "output"_a, "seed"_a, "call"_a, "stored_key"_a, "number"_a,
        "stores_key"_a, "dropped_below"_a, "factor"_a, "device"_a, "stream"_a,
        "Draw the random numbers of a block's cells, by their index in the tensor of `shape`, on "
        "the host (device -1) or on a stream of a GPU.");
  m.def(
      "capture_id",
      [](uintptr_t stream) {
        const DeviceApi* const api = cuda_api();
        uint64_t id = 0;
        if (api == nullptr) return id;
        const int error = api->capture_id(reinterpret_cast<DeviceStream>(stream), &id);
        check_device(*api, error, "asking whether a stream is captured");
        return id;
      },
      "stream"_a, "Number of the capture of a stream into a CUDA graph; 0 if there is none.");
  m.def("random_key", key_of, "seed"_a, "call"_a, "The key of the numbers of a seed and a call.");
}

}  // namespace gpudist
