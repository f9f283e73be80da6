// The parts of the Python module: each adds its own to it.
#pragma once

#include <nanobind/nanobind.h>

void bind_environment(nanobind::module_& m);
