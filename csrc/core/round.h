// One stage of several movements, run by one call from Python with its input and output tensors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <utility>
#include <vector>

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
  nb::object call(nb::handle x) const {
    PyObject* found = PyObject_CallMethodNoArgs(x.ptr(), name);
    if (found == nullptr) nb::raise_python_error();
    return nb::steal(found);
  }
  PyObject* const name;  // never released: modules outlive it
};

// Calls into Python only to bind stages, to allocate outputs and to check inputs.
//
// Wire defines a type Stage, a type Call (a stage and two addresses), and
//   context(): what run() needs from Python; called with the GIL held;
//   run(calls, context): runs the calls; called without the GIL.
template <class Wire>
class Round {
 public:
  static constexpr int kCpu = -1;
  using Call = typename Wire::Call;
  using Stage = typename Wire::Stage;
  // Each part: the index of its tensor, the expected shape and dtype (None: not checked), whether
  // it takes an input and returns an output, and Python callables. Stages and `makers` are looked
  // up by the strides of the input.
  using PartTuple = std::tuple<size_t, nb::object, nb::object, bool, bool, nb::object, nb::object,
                               nb::dict, nb::dict, nb::object>;

  // `device`: where inputs must be, the index of a GPU or kCpu.
  Round(Wire wire, int device, const std::vector<PartTuple>& parts)
      : wire_(std::move(wire)), device_(device) {
    for (const auto& [index, shape, dtype, takes, gives, check, make, makers, bound, bind] :
         parts) {
      parts_.push_back({index, shape, dtype, takes, gives, check, make, makers, bound, bind});
    }
  }

  // `blocks` is a list or a tuple.
  nb::list run(const nb::object& blocks) const {
    nb::list outputs;
    std::vector<nb::object> inputs;  // kept alive
    std::vector<Call> calls;
    inputs.reserve(parts_.size());
    calls.reserve(parts_.size());
    for (const Part& part : parts_) {
      if (!part.takes && !part.gives) {
        outputs.append(part.make());
        continue;
      }
      const Input input = part.takes ? input_of(part, nb::object(blocks[part.index])) : Input();
      Stage& bound = stage(part, input.strides);
      nb::object output = maker(part, input.strides)();
      calls.push_back(Wire::call(bound, input.address, part.gives ? address(output) : 0));
      inputs.push_back(input.tensor);
      outputs.append(std::move(output));
    }
    const auto context = wire_.context();
    const nb::gil_scoped_release release;
    wire_.run(calls, context);
    return outputs;
  }

 private:
  struct Part {
    size_t index;
    nb::object shape, dtype;
    bool takes, gives;
    nb::object check, make;
    nb::dict makers, bound;
    nb::object bind;
  };

  struct Input {
    nb::object tensor, strides = nb::tuple();
    uintptr_t address = 0;
  };

  // An input without memory goes to Python's check, which raises or returns an equal block.
  Input input_of(const Part& part, const nb::object& x) const {
    if (part.shape.is_none()) return {x, stride_.call(x), address(x)};
    const bool plain = shape_.of(x).equal(part.shape) && dtype_.of(x).is(part.dtype) &&
                       is_here(x) && is_neg_.call(x).is(Py_False) && is_conj_.call(x).is(Py_False);
    const uintptr_t found = plain ? address_if_any(x) : 0;
    if (found != 0) return {x, stride_.call(x), found};
    const nb::object block = part.check(x);
    return {block, stride_.call(block), address(block)};
  }

  bool is_here(const nb::object& x) const {
    if (device_ == kCpu) return is_cpu_.of(x).is(Py_True);
    return is_cuda_.of(x).is(Py_True) && nb::cast<int>(get_device_.call(x)) == device_;
  }

  static Stage& stage(const Part& part, const nb::object& strides) {
    PyObject* found = PyDict_GetItemWithError(part.bound.ptr(), strides.ptr());
    if (found != nullptr) return nb::cast<Stage&>(nb::handle(found));
    const nb::object made = part.bind(strides);  // `bind` stores it in `bound`
    return nb::cast<Stage&>(made);
  }

  static nb::object maker(const Part& part, const nb::object& strides) {
    if (PyDict_GET_SIZE(part.makers.ptr()) == 0) return part.make;
    PyObject* found = PyDict_GetItemWithError(part.makers.ptr(), strides.ptr());
    return found != nullptr ? nb::borrow(found) : part.make;
  }

  uintptr_t address(const nb::object& tensor) const {
    return nb::cast<uintptr_t>(data_ptr_.call(tensor));
  }

  // Address of the tensor, or 0 if it has no storage: data_ptr() raises then.
  uintptr_t address_if_any(const nb::object& tensor) const {
    const nb::object found = nb::steal(PyObject_CallMethodNoArgs(tensor.ptr(), data_ptr_.name));
    if (found.is_valid()) return nb::cast<uintptr_t>(found);
    PyErr_Clear();
    return 0;
  }

  const Name shape_{"shape"}, dtype_{"dtype"}, is_cpu_{"is_cpu"}, is_cuda_{"is_cuda"},
      get_device_{"get_device"}, is_neg_{"is_neg"}, is_conj_{"is_conj"}, stride_{"stride"},
      data_ptr_{"data_ptr"};

  Wire wire_;
  const int device_;
  std::vector<Part> parts_;
};

}  // namespace gpudist
