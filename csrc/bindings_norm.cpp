// Python bindings to normalize the lines of a block. An address of 0 stands for no tensor.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "core/norm_lines.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gpudist {

namespace {

template <class T = float>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

void bind_norm(nb::module_& m) {
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
