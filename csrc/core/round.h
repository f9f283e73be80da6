// One stage of several movements, run by one call from Python with its input and output tensors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>
#include <vector>

#include "core/torch_state.h"

namespace gpudist {

namespace nb = nanobind;

// Where the calls of a round are recorded: a FlightRecorder, an Activity, and what is called with
// the operation and a function that raises the error again when a call fails. It raises.
struct Recording {
  nb::object recorder, activity, failed, remember;

  Recording() = default;
  Recording(nb::object recorder, nb::object activity, nb::object failed)
      : recorder(std::move(recorder)), activity(std::move(activity)), failed(std::move(failed)) {
    if (is_there()) remember = this->recorder.attr("remember");
  }
  bool is_there() const { return activity.is_valid() && !activity.is_none(); }
};

// Calls into Python only to bind stages, to allocate outputs, to check inputs and to record.
//
// Wire defines a type Stage, a type Call (a stage and two addresses), and
//   kWaits: whether run() waits for the others, so that the time of a call is recorded;
//   context(): what run() needs from Python; called with the GIL held;
//   held(): the Python object that it keeps, or nullptr;
//   run(calls, context): runs the calls; called without the GIL.
template <class Wire>
class Round {
 public:
  static constexpr int kCpu = -1;
  using Call = typename Wire::Call;
  using Stage = typename Wire::Stage;

  // `device`: where inputs must be, the index of a GPU or kCpu. `steps`: a MovementStep for each
  // tensor, or None where there is nothing to do. Its attribute `bound` maps the strides of an
  // input to the bound stage and a callable that makes the output.
  Round(Wire wire, int device, const std::vector<nb::object>& steps, Recording recording)
      : wire_(std::move(wire)), device_(device), recording_(std::move(recording)) {
    for (const nb::object& step : steps) {
      if (step.is_none()) {
        steps_.emplace_back();
        continue;
      }
      steps_.push_back(
          {true, nb::cast<bool>(step.attr("takes")), nb::cast<bool>(step.attr("gives")),
           nb::cast<bool>(step.attr("dtype").attr("is_complex")), step.attr("input_shape"),
           step.attr("input_dtype"), step.attr("block"), step.attr("make_output"),
           nb::cast<nb::dict>(step.attr("bound")), step.attr("bind")});
    }
  }

  // A movement keeps its rounds, which keep the partition of its steps and with it a world that may
  // keep the movement: Python's garbage collector must see the way through here.
  static PyType_Slot* slots() {
    static PyType_Slot found[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                  {0, nullptr}};
    return found;
  }

  nb::list run(const nb::object& tensors) const {
    return recorded([&] { return execute(tensors); });
  }

  // The output, if all is as in the last call: one plain tensor with the same layout, and a torch
  // that only executes. Otherwise None, and nothing has happened.
  nb::object run_like_last(nb::handle x) const {
    if (steps_.size() != 1) return nb::none();
    const Step& step = steps_[0];
    dlpack::Tensor seen;
    const bool is_seen = step.takes ? reader_.read(x, seen) : reader_.describe(x, seen);
    if (!is_seen || !step.is_like_last(seen) || requires_grad_.of(x).is(Py_True) ||
        !is_resolved(step, x) || !torch_.is_plain()) {
      return nb::none();
    }
    const nb::tuple bound = step.last_bound;
    return recorded([&] {
      nb::object output = output_of(step, bound);
      run_calls({call_of(step, bound, step.takes ? address_of(seen) : 0, output)});
      return output;
    });
  }

 private:
  template <class Execute>
  auto recorded(const Execute& execute) const {
    if (!recording_.is_there()) return execute();
    const bool is_observed = PyTuple_Size(observers_.of(recording_.recorder).ptr()) != 0;
    nb::object operation = nb::none();
    const double start_s = now_s();
    if (is_observed) {
      operation = recording_.recorder.attr("begin")(recording_.activity);
    } else if (Wire::kWaits) {
      operation = nb::steal(PyList_New(3));
      PyList_SetItem(operation.ptr(), 0, nb::object(recording_.activity).release().ptr());
      PyList_SetItem(operation.ptr(), 1, PyFloat_FromDouble(start_s));
      PyList_SetItem(operation.ptr(), 2, nb::none().release().ptr());
      recording_.remember(operation);
    }
    auto outputs = [&] {
      try {
        return execute();
      } catch (...) {
        const std::exception_ptr error = std::current_exception();
        recording_.failed(operation, nb::cpp_function([error] { std::rethrow_exception(error); }));
        throw;
      }
    }();
    if (is_observed) {
      recording_.recorder.attr("end")(operation);
      return outputs;
    }
    const nb::object& activity = recording_.activity;
    if (Wire::kWaits) {
      const double end_s = now_s();
      PyList_SetItem(operation.ptr(), 2, PyFloat_FromDouble(end_s));
      seconds_.set(activity, seconds_.of(activity) + nb::float_(end_s - start_s));
    }
    calls_.set(activity, calls_.of(activity) + nb::int_(1));
    return outputs;
  }

  // As Python's time.monotonic().
  static double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  void run_calls(const std::vector<Call>& calls) const {
    const auto context = wire_.context();
    const nb::gil_scoped_release release;
    wire_.run(calls, context);
  }

  nb::list execute(const nb::object& tensors) const {
    const auto blocks = nb::steal<nb::tuple>(PySequence_Tuple(tensors.ptr()));
    if (!blocks.is_valid()) nb::raise_python_error();
    if (blocks.size() != steps_.size()) {
      throw nb::value_error("there is one tensor per movement");
    }
    nb::list outputs;
    std::vector<nb::object> inputs;  // kept alive
    std::vector<Call> calls;
    inputs.reserve(steps_.size());
    calls.reserve(steps_.size());
    for (size_t i = 0; i < steps_.size(); ++i) {
      const Step& step = steps_[i];
      const nb::object x = blocks[i];
      if (!step.is_there) {
        outputs.append(x);
        continue;
      }
      if (!step.takes && !step.gives) {
        outputs.append(step.make_output());
        continue;
      }
      const Input input = step.takes ? input_of(step, x) : placeholder_of(step, x);
      const nb::tuple bound = input.is_like_last ? step.last_bound : bound_to(step, input.strides);
      if (input.can_be_last) step.last_bound = bound;
      nb::object output = output_of(step, bound);
      calls.push_back(call_of(step, bound, input.address, output));
      inputs.push_back(input.tensor);
      outputs.append(std::move(output));
    }
    run_calls(calls);
    return outputs;
  }

  struct Step {
    bool is_there = false, takes = false, gives = false, is_complex = false;
    nb::object shape, dtype;  // None: not checked
    nb::object check, make_output;
    nb::dict bound;
    nb::object bind;
    // The last input that was as it should be, and what was bound to it.
    mutable dlpack::Tensor last = {};
    mutable std::vector<int64_t> last_extents;
    mutable nb::tuple last_bound;

    bool is_like_last(const dlpack::Tensor& x) const {
      const size_t dims = static_cast<size_t>(x.ndim);
      return last_bound.is_valid() && last_extents.size() == 2 * dims &&
             x.dtype.code == last.dtype.code && x.dtype.bits == last.dtype.bits &&
             x.device.type == last.device.type && x.device.id == last.device.id &&
             std::equal(x.shape, x.shape + dims, last_extents.begin()) &&
             std::equal(x.strides, x.strides + dims, last_extents.begin() + x.ndim);
    }
    void set_last(const dlpack::Tensor& x) const {
      last = x;
      last_extents.assign(x.shape, x.shape + x.ndim);
      last_extents.insert(last_extents.end(), x.strides, x.strides + x.ndim);
      last_bound.reset();
    }

    template <class Visit>
    int visit(Visit each) const {
      for (PyObject* held :
           {check.ptr(), make_output.ptr(), bound.ptr(), bind.ptr(), last_bound.ptr()}) {
        const int stop = held != nullptr ? each(held) : 0;
        if (stop != 0) return stop;
      }
      return 0;
    }
  };

  struct Input {
    nb::object tensor, strides = nb::tuple();
    uintptr_t address = 0;
    bool is_like_last = false, can_be_last = false;
  };

  // An input without memory goes to Python's check, which raises or returns an equal block.
  Input input_of(const Step& step, const nb::object& x) const {
    dlpack::Tensor seen;
    const bool is_seen = reader_.read(x, seen);
    if (is_seen && step.is_like_last(seen) && is_resolved(step, x)) {
      return {x, nb::object(), address_of(seen), true};
    }
    if (step.shape.is_none()) return {x, stride_.call(x), address(x)};
    const uintptr_t found = is_as_bound(step, x) && is_resolved(step, x) ? address_if_any(x) : 0;
    if (found != 0) {
      if (is_seen) step.set_last(seen);
      return {x, stride_.call(x), found, false, is_seen};
    }
    const nb::object block = step.check(x);
    return {block, stride_.call(block), address(block)};
  }

  // What a rank without an input block gets in its place. It is not read.
  Input placeholder_of(const Step& step, const nb::object& x) const {
    dlpack::Tensor seen;
    Input input;
    if (step.shape.is_none() || !reader_.describe(x, seen)) return input;
    input.is_like_last = step.is_like_last(seen);
    if (!input.is_like_last && is_as_bound(step, x)) {
      step.set_last(seen);
      input.can_be_last = true;
    }
    return input;
  }

  bool is_as_bound(const Step& step, const nb::object& x) const {
    return shape_.of(x).equal(step.shape) && dtype_.of(x).is(step.dtype) && is_here(x);
  }

  // Whether the memory has the values of the tensor, not their negatives or conjugates.
  bool is_resolved(const Step& step, nb::handle x) const {
    return is_neg_.call(x).is(Py_False) && !(step.is_complex && is_conj_.call(x).is(Py_True));
  }

  bool is_here(const nb::object& x) const {
    if (device_ == kCpu) return is_cpu_.of(x).is(Py_True);
    return is_cuda_.of(x).is(Py_True) && nb::cast<int>(get_device_.call(x)) == device_;
  }

  static nb::object output_of(const Step& step, const nb::tuple& bound) {
    return step.gives ? nb::object(bound[1]()) : step.make_output();
  }

  Call call_of(const Step& step, const nb::tuple& bound, uintptr_t input,
               const nb::object& output) const {
    return Wire::call(nb::cast<Stage&>(bound[0]), input, step.gives ? address(output) : 0);
  }

  // The bound stage, and the callable that makes its output.
  static nb::tuple bound_to(const Step& step, const nb::object& strides) {
    PyObject* found = PyDict_GetItemWithError(step.bound.ptr(), strides.ptr());
    // `bind` stores what it returns in `bound`.
    return found != nullptr ? nb::borrow<nb::tuple>(found) : nb::tuple(step.bind(strides));
  }

  uintptr_t address(const nb::object& tensor) const {
    dlpack::Tensor seen;
    if (reader_.read(tensor, seen)) return address_of(seen);
    return nb::cast<uintptr_t>(data_ptr_.call(tensor));
  }

  // Address of the tensor, or 0 if it has no storage: data_ptr() raises then.
  uintptr_t address_if_any(const nb::object& tensor) const {
    const nb::object found = data_ptr_.try_call(tensor);
    if (found.is_valid()) return nb::cast<uintptr_t>(found);
    PyErr_Clear();
    return 0;
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const Round& round = *nb::inst_ptr<Round>(self);
    Py_VISIT(round.wire_.held());
    const Recording& recording = round.recording_;
    for (const nb::object* held :
         {&recording.recorder, &recording.activity, &recording.failed, &recording.remember}) {
      Py_VISIT(held->ptr());
    }
    for (const Step& step : round.steps_) {
      const int stop = step.visit([&](PyObject* held) { return visit(held, arg); });
      if (stop != 0) return stop;
    }
    return 0;
  }

  static int clear(PyObject* self) {
    if (!nb::inst_ready(self)) return 0;
    Round& round = *nb::inst_ptr<Round>(self);
    std::exchange(round.steps_, {});
    std::exchange(round.recording_, {});
    return 0;
  }

  const Name shape_{"shape"}, dtype_{"dtype"}, is_cpu_{"is_cpu"}, is_cuda_{"is_cuda"},
      get_device_{"get_device"}, is_neg_{"is_neg"}, is_conj_{"is_conj"}, stride_{"stride"},
      data_ptr_{"data_ptr"}, requires_grad_{"requires_grad"}, observers_{"observers"},
      calls_{"calls"}, seconds_{"seconds"};

  const TensorReader reader_;
  const EagerState torch_;
  Wire wire_;
  const int device_;
  Recording recording_;
  std::vector<Step> steps_;
};

}  // namespace gpudist
