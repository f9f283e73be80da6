// How the core reads tensors and state of torch, which it does not link to.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "core/dlpack.h"

namespace gpudist {

namespace nb = nanobind;

// An interned attribute name: looking up a name by its text costs as much as the call itself.
struct Name {
  explicit Name(const char* text) : name(PyUnicode_InternFromString(text)) {}
  nb::object of(nb::handle x) const {
    PyObject* found = PyObject_GetAttr(x.ptr(), name);
    if (found == nullptr) nb::raise_python_error();
    return nb::steal(found);
  }
  void set(nb::handle x, const nb::object& value) const {
    if (PyObject_SetAttr(x.ptr(), name, value.ptr()) != 0) nb::raise_python_error();
  }
  nb::object call(nb::handle x) const {
    nb::object found = try_call(x);
    if (!found.is_valid()) nb::raise_python_error();
    return found;
  }
  // Invalid, with Python's error set, if the method raises.
  nb::object try_call(nb::handle x) const {
    PyObject* self = x.ptr();
    constexpr size_t kArguments = 1 | PY_VECTORCALL_ARGUMENTS_OFFSET;
    return nb::steal(PyObject_VectorcallMethod(name, &self, kArguments, nullptr));
  }
  PyObject* const name;  // never released: modules outlive it
};

// Describes tensors of torch by one call each, where this torch offers it; attributes take ten.
class TensorReader {
 public:
  TensorReader() {
    const nb::object torch = nb::module_::import_("torch");
    tensor_ = torch.attr("Tensor");
    const nb::object capsule = nb::getattr(tensor_, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), dlpack::kExchangeCapsuleName)) return;
    const auto* api = static_cast<const dlpack::ExchangeApi*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kExchangeCapsuleName));
    if (api->version.major == 1) describe_ = api->describe;
  }

  // Whether `x` is a plain tensor that could be described.
  bool describe(nb::handle x, dlpack::Tensor& description) const {
    if (describe_ == nullptr || x.type().ptr() != tensor_.ptr()) return false;
    if (describe_(x.ptr(), &description) != 0) {
      PyErr_Clear();
      return false;
    }
    return description.strides != nullptr;
  }

  // Whether it also has memory.
  bool read(nb::handle x, dlpack::Tensor& description) const {
    return describe(x, description) && description.data != nullptr;
  }

 private:
  nb::object tensor_;
  int (*describe_)(void*, dlpack::Tensor*) = nullptr;
};

inline uintptr_t address_of(const dlpack::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset;
}

// Whether torch only executes: no mode, transform or tracer is active that movements must know of,
// as in `is_eager` of gpudist/exchange/torch_library.py. torch.compile is not among them, since
// nothing here runs while it traces.
class EagerState {
 public:
  EagerState() {
    const nb::module_ torch = nb::module_::import_("torch._C");
    for (const char* name :
         {"_are_functorch_transforms_active", "_len_torch_dispatch_stack", "_is_tracing"}) {
      counts_.push_back(torch.attr(name));
    }
    is_included_ = torch.attr("_dispatch_tls_is_dispatch_key_included");
    early_ = torch.attr("DispatchKey").attr("PreDispatch");
    forward_mode_ = nb::module_::import_("torch.autograd.forward_ad").attr("__dict__");
  }

  bool is_plain() const {
    for (const nb::object& count : counts_) {
      if (PyObject_IsTrue(count().ptr()) != 0) return false;
    }
    return is_included_(early_).is(Py_False) && nb::cast<int>(forward_mode_[level_]) < 0;
  }

 private:
  std::vector<nb::object> counts_;
  nb::object is_included_, early_;
  nb::dict forward_mode_;
  const nb::str level_{"_current_level"};
};

}  // namespace gpudist
