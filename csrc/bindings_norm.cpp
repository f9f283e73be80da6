// Python bindings to normalize a block. An address of 0 stands for no tensor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.h"
#include "core/norm_lines.h"
#include "device/device_norm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gpudist {

namespace {

template <class T = float>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Addresses of the weight and the bias, and their dtype.
using Parameters = std::tuple<uintptr_t, uintptr_t, Dtype>;
// Addresses of mean, variance and number of batches, the momentum, and the dtype of the first two.
using Running = std::tuple<uintptr_t, uintptr_t, uintptr_t, double, Dtype>;

DeviceStream stream_at(uintptr_t handle) {
  return reinterpret_cast<DeviceStream>(handle);
}

void bind_device_norm(nb::module_& m) {
  nb::enum_<NormWalk>(m, "NormWalk", "How a block is stored, and what its parameters belong to.")
      .value("rows", NormWalk::kRows)
      .value("columns", NormWalk::kColumns)
      .value("cells", NormWalk::kCells);

  nb::class_<DeviceNorm>(m, "DeviceNorm", "The normalization of blocks of one shape on a GPU.")
      .def(
          "__init__",
          [](DeviceNorm* self, const std::string& library, int device, NormWalk walk, Dtype dtype,
             Dtype result_dtype, int64_t outer, int64_t channels, int64_t cells, int64_t groups,
             int64_t group_size, int64_t group_offset, bool shares_outer, double count, double eps,
             bool subtracts_mean) {
            new (self) DeviceNorm(
                device_api(library.c_str()), device,
                NormShape{walk, dtype, result_dtype, outer, channels, cells, groups, group_size,
                          group_offset, shares_outer, count, eps, subtracts_mean});
          },
          "library"_a, "device"_a, "walk"_a, "dtype"_a, "result_dtype"_a, "outer"_a, "channels"_a,
          "cells"_a, "groups"_a, "group_size"_a, "group_offset"_a, "shares_outer"_a, "count"_a,
          "eps"_a, "subtracts_mean"_a)
      .def_prop_ro("workspace", &DeviceNorm::workspace)
      .def(
          "sums",
          [](const DeviceNorm& self, uintptr_t x, uintptr_t shifts, uintptr_t sums,
             uintptr_t workspace, uintptr_t stream) {
            NormTensors tensors;
            tensors.x = at<char>(x);
            tensors.shifts = at<double>(shifts);
            tensors.sums = at<double>(sums);
            tensors.workspace = at<double>(workspace);
            self.sums(tensors, stream_at(stream));
          },
          "x"_a, "shifts"_a, "sums"_a, "workspace"_a, "stream"_a)
      .def(
          "normalize",
          [](const DeviceNorm& self, uintptr_t x, uintptr_t totals, uintptr_t shifts,
             const Parameters& parameters, uintptr_t y, const Running& running, uintptr_t failed,
             uintptr_t stream) {
            NormTensors tensors;
            tensors.x = at<char>(x);
            tensors.totals = at<double>(totals);
            tensors.shifts = at<double>(shifts);
            tensors.weight = at<char>(std::get<0>(parameters));
            tensors.bias = at<char>(std::get<1>(parameters));
            tensors.parameter_dtype = std::get<2>(parameters);
            tensors.result = at<char>(y);
            tensors.failed = at<uint32_t>(failed);
            const auto [mean, variance, batches, momentum, dtype] = running;
            self.normalize(
                tensors,
                {at<char>(mean), at<char>(variance), at<int64_t>(batches), momentum, dtype},
                stream_at(stream));
          },
          "x"_a, "totals"_a, "shifts"_a, "parameters"_a, "y"_a, "running"_a, "failed"_a, "stream"_a)
      .def(
          "gradient_sums",
          [](const DeviceNorm& self, uintptr_t gradient, uintptr_t x, uintptr_t totals,
             uintptr_t shifts, const Parameters& parameters, uintptr_t of_sums,
             const Parameters& of_parameters, uintptr_t workspace, uintptr_t stream) {
            NormTensors tensors;
            tensors.gradient = at<char>(gradient);
            tensors.x = at<char>(x);
            tensors.totals = at<double>(totals);
            tensors.shifts = at<double>(shifts);
            tensors.weight = at<char>(std::get<0>(parameters));
            tensors.parameter_dtype = std::get<2>(parameters);
            tensors.sums = at<double>(of_sums);
            tensors.of_weight = at<char>(std::get<0>(of_parameters));
            tensors.of_bias = at<char>(std::get<1>(of_parameters));
            tensors.workspace = at<double>(workspace);
            self.gradient_sums(tensors, stream_at(stream));
          },
          "gradient"_a, "x"_a, "totals"_a, "shifts"_a, "parameters"_a, "of_sums"_a,
          "of_parameters"_a, "workspace"_a, "stream"_a)
      .def(
          "gradient",
          [](const DeviceNorm& self, uintptr_t gradient, uintptr_t x, uintptr_t totals,
             uintptr_t shifts, uintptr_t of_totals, const Parameters& parameters, uintptr_t of_x,
             uintptr_t failed, uintptr_t stream) {
            NormTensors tensors;
            tensors.gradient = at<char>(gradient);
            tensors.x = at<char>(x);
            tensors.totals = at<double>(totals);
            tensors.shifts = at<double>(shifts);
            tensors.of_totals = at<double>(of_totals);
            tensors.weight = at<char>(std::get<0>(parameters));
            tensors.parameter_dtype = std::get<2>(parameters);
            tensors.result = at<char>(of_x);
            tensors.failed = at<uint32_t>(failed);
            self.gradient(tensors, stream_at(stream));
          },
          "gradient"_a, "x"_a, "totals"_a, "shifts"_a, "of_totals"_a, "parameters"_a, "of_x"_a,
          "failed"_a, "stream"_a);
}

}  // namespace

void bind_norm(nb::module_& m) {
  bind_device_norm(m);
  nb::class_<NormLines>(m, "NormLines", "The normalization of blocks of one shape, by lines.")
      .def(
          "__init__",
          [](NormLines* self, int64_t lines, int64_t channels, int64_t cells,
             const std::vector<int64_t>& statistic_of, int64_t statistics, double count, double eps,
             bool subtracts_mean, bool parameters_of_cells) {
            new (self) NormLines(NormLayout{lines, channels, cells, statistic_of, statistics, count,
                                            eps, subtracts_mean, parameters_of_cells});
          },
          "lines"_a, "channels"_a, "cells"_a, "statistic_of"_a, "statistics"_a, "count"_a, "eps"_a,
          "subtracts_mean"_a, "parameters_of_cells"_a)
      .def(
          "sums",
          [](const NormLines& self, uintptr_t x, uintptr_t sums) {
            self.sums(at(x), at<double>(sums));
          },
          "x"_a, "sums"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "normalize",
          [](const NormLines& self, uintptr_t x, uintptr_t totals, uintptr_t weight, uintptr_t bias,
             uintptr_t y) {
            self.normalize(at(x), at<double>(totals), at(weight), at(bias), at(y));
          },
          "x"_a, "totals"_a, "weight"_a, "bias"_a, "y"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "gradient_sums",
          [](const NormLines& self, uintptr_t gradient, uintptr_t x, uintptr_t totals,
             uintptr_t weight, uintptr_t of_sums, uintptr_t of_weight, uintptr_t of_bias) {
            self.gradient_sums(at(gradient), at(x), at<double>(totals), at(weight),
                               at<double>(of_sums), at(of_weight), at(of_bias));
          },
          "gradient"_a, "x"_a, "totals"_a, "weight"_a, "of_sums"_a, "of_weight"_a, "of_bias"_a,
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "gradient",
          [](const NormLines& self, uintptr_t gradient, uintptr_t x, uintptr_t totals,
             uintptr_t of_totals, uintptr_t weight, uintptr_t of_x) {
            self.gradient(at(gradient), at(x), at<double>(totals), at<double>(of_totals),
                          at(weight), at(of_x));
          },
          "gradient"_a, "x"_a, "totals"_a, "of_totals"_a, "weight"_a, "of_x"_a,
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace gpudist
