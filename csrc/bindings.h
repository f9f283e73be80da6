// Parts of the Python module: each function adds its bindings.
#pragma once

#include <nanobind/nanobind.h>

namespace gpudist {

void bind_environment(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_nccl(nanobind::module_& m);
void bind_norm(nanobind::module_& m);
void bind_random(nanobind::module_& m);

// Run Python's signal handlers. The caller may hold a communicator's lock: bindings release the GIL
// before they take that lock, so acquiring the GIL here cannot deadlock.
inline void check_signals() {
  const nanobind::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace gpudist
