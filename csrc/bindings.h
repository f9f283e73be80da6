// The parts of the Python module: each adds its own to it.
#pragma once

#include <nanobind/nanobind.h>

namespace gpudist {

void bind_environment(nanobind::module_& m);
void bind_nccl(nanobind::module_& m);
void bind_norm(nanobind::module_& m);

// Calls release the interpreter's lock before they take a communicator's, which this may be under.
inline void check_signals() {
  const nanobind::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace gpudist
