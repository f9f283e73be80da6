// The Python module. Only bindings*, core/round.h and core/torch_state.h use Python's API. Tensors
// are passed as addresses; the caller keeps them alive.
#include "bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "core/errors.h"
#include "core/round.h"
#include "host/host_communicator.h"
#include "host/pieces.h"
#include "host/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Boxes = gpudist::StageBoxes::Boxes;
using Messages = gpudist::StageBoxes::Messages;
using gpudist::BoundStage;
using gpudist::Exchange;
using gpudist::HostCommunicator;
using gpudist::Pieces;
using gpudist::Signature;
using gpudist::StageCall;
using gpudist::Transfer;

using Calls = std::vector<std::tuple<const BoundStage*, uintptr_t, uintptr_t>>;

StageCall stage_call(const BoundStage& stage, uintptr_t input, uintptr_t output) {
  return {&stage, reinterpret_cast<const char*>(input), reinterpret_cast<char*>(output)};
}

// Wire of a Round over the host core.
struct HostWire {
  using Stage = const BoundStage;
  using Call = StageCall;
  struct Context {};
  static constexpr bool kWaits = true;

  static Call call(Stage& stage, uintptr_t input, uintptr_t output) {
    return stage_call(stage, input, output);
  }
  Context context() const { return {}; }
  static PyObject* held() { return nullptr; }
  void run(const std::vector<Call>& calls, Context) const {
    if (communicator != nullptr) return gpudist::run_stages(*communicator, *signature, calls);
    for (const Call& call : calls) gpudist::run_local_stage(call);
  }

  HostCommunicator* communicator;
  const Signature* signature;
};

// Releases the GIL while its destructor waits for another thread inside the communicator: that
// thread may need the GIL.
template <class InFlight>
struct Unlocked : InFlight {
  using InFlight::InFlight;
  ~Unlocked() {
    const nb::gil_scoped_release release;
    InFlight::end();
  }
};

using HostRound = gpudist::Round<HostWire>;

std::vector<StageCall> stage_calls(const Calls& calls) {
  std::vector<StageCall> bound;
  bound.reserve(calls.size());
  for (const auto& [stage, input, output] : calls) {
    bound.push_back(stage_call(*stage, input, output));
  }
  return bound;
}

void set_error(const char* name, const nb::object& arguments) {
  const nb::object type = nb::module_::import_("gpudist.errors").attr(name);
  PyErr_SetObject(type.ptr(), type(*arguments).ptr());
}

void translate(const std::exception_ptr& error, void*) {
  try {
    std::rethrow_exception(error);
  } catch (const gpudist::PeerFailure& e) {
    set_error("PeerFailure", nb::make_tuple(e.what(), e.rank));
  } catch (const gpudist::PlanMismatch& e) {
    set_error("PlanMismatch", nb::make_tuple(e.what()));
  } catch (const gpudist::CollectiveTimeout& e) {
    set_error("CollectiveTimeout", nb::make_tuple(e.what()));
  } catch (const gpudist::NotBuiltError& e) {
    set_error("NotBuiltError", nb::make_tuple(e.what()));
  } catch (const gpudist::TransportError& e) {
    set_error("TransportError", nb::make_tuple(e.what()));
  }
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The native core: packing, and messages through shared memory.";
#ifdef NDEBUG
  // Modules keep plans until the process exits; nanobind would report them as leaks.
  nb::set_leak_warnings(false);
#endif
  nb::register_exception_translator(translate);
  nb::exception<gpudist::WorldFailed>(m, "WorldFailed");
  const nb::object transport_error = nb::module_::import_("gpudist.errors").attr("TransportError");
  nb::exception<gpudist::RefusedCapture>(m, "RefusedCapture", transport_error);

  nb::enum_<gpudist::Dtype>(m, "Dtype")
      .value("bool", gpudist::Dtype::kBool)
      .value("uint8", gpudist::Dtype::kUint8)
      .value("int8", gpudist::Dtype::kInt8)
      .value("int16", gpudist::Dtype::kInt16)
      .value("int32", gpudist::Dtype::kInt32)
      .value("int64", gpudist::Dtype::kInt64)
      .value("float16", gpudist::Dtype::kFloat16)
      .value("bfloat16", gpudist::Dtype::kBfloat16)
      .value("float32", gpudist::Dtype::kFloat32)
      .value("float64", gpudist::Dtype::kFloat64)
      .value("complex64", gpudist::Dtype::kComplex64)
      .value("complex128", gpudist::Dtype::kComplex128);

  nb::class_<Signature>(m, "Signature", "Label of an operation, and 16 bytes that identify it.")
      .def(
          "__init__",
          [](Signature* self, std::string label, const nb::bytes& digest) {
            if (digest.size() != 16) throw gpudist::TransportError("a digest has 16 bytes");
            new (self) Signature{std::move(label), std::string(digest.c_str(), digest.size())};
          },
          "label"_a, "digest"_a);

  nb::class_<BoundStage>(m, "BoundStage", "A stage of a plan bound to shapes, strides and a dtype.")
      .def(
          "__init__",
          [](BoundStage* self, gpudist::Dtype dtype, const std::vector<int64_t>& input_strides,
             const std::vector<int64_t>& output_strides, int64_t output_items, double fill,
             bool starts_with_copy, bool same_cells, bool accumulates, const Boxes& fills,
             const Boxes& move_sources, const Boxes& move_destinations, const Messages& sends,
             const Messages& receives, const Messages& sums, const Boxes& own_sources,
             const Messages& relays, const Messages& relayed) {
            new (self) BoundStage(dtype, input_strides, output_strides, output_items, fill,
                                  starts_with_copy, same_cells, accumulates,
                                  {fills, move_sources, move_destinations, sends, receives, sums,
                                   own_sources, relays, relayed});
          },
          "dtype"_a, "input_strides"_a, "output_strides"_a, "output_items"_a, "fill"_a,
          "starts_with_copy"_a, "same_cells"_a, "accumulates"_a, "fills"_a, "move_sources"_a,
          "move_destinations"_a, "sends"_a, "receives"_a, "sums"_a, "own_sources"_a, "relays"_a,
          "relayed"_a);

  nb::class_<HostCommunicator>(m, "HostCommunicator",
                               "Messages between processes of one node, or threads of one.")
      .def(
          "__init__",
          [](HostCommunicator* self, int rank, int size, double timeout_s, const nb::object& rest) {
            std::function<void()> with_gil;
            if (!rest.is_none()) {
              with_gil = [rest] {
                const nb::gil_scoped_acquire acquire;
                rest();
              };
            }
            new (self) HostCommunicator(rank, size, timeout_s, gpudist::check_signals,
                                        std::move(with_gil));
          },
          "rank"_a, "size"_a, "timeout_s"_a, "rest"_a = nb::none())
      .def("address", &HostCommunicator::address)
      .def("connect", &HostCommunicator::connect, "addresses"_a)
      .def("begin", &HostCommunicator::begin, "signature"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "run",
          [](HostCommunicator& self, const Signature& signature, const Calls& calls) {
            const std::vector<StageCall> bound = stage_calls(calls);
            nb::gil_scoped_release release;
            gpudist::run_stages(self, signature, bound);
          },
          "signature"_a, "calls"_a)
      .def("post_failure", &HostCommunicator::post_failure, "text"_a)
      .def("failure", &HostCommunicator::failure)
      .def("reports", &HostCommunicator::reports)
      .def("may_go_on", &HostCommunicator::may_go_on)
      .def("unfinished",
           [](const HostCommunicator& self) {
             nb::list found;
             for (const Transfer* transfer : self.unfinished()) {
               const Signature& signature = *transfer->signature;
               found.append(nb::make_tuple(
                   transfer->kind == Transfer::Kind::kSend, transfer->peer, transfer->sequence,
                   transfer->bytes, nb::bytes(signature.digest.data(), signature.digest.size()),
                   signature.label));
             }
             return found;
           })
      .def("posted", &HostCommunicator::posted, "sends"_a, "peer"_a)
      .def("fold", &HostCommunicator::fold, "peers"_a, "number"_a, "what"_a)
      .def("try_enter", &HostCommunicator::try_enter)
      .def("leave", &HostCommunicator::leave)
      .def("close", &HostCommunicator::close, nb::call_guard<nb::gil_scoped_release>())
      .def("leave_to_parent", &HostCommunicator::leave_to_parent);

  nb::class_<HostRound>(m, "Round", nb::type_slots(HostRound::slots()),
                        "One stage of each of several movements.")
      .def(
          "__init__",
          [](HostRound* self, HostCommunicator* communicator, const Signature* signature,
             const std::vector<nb::object>& steps, nb::object recorder, nb::object activity,
             nb::object failed) {
            new (self) HostRound({communicator, signature}, HostRound::kCpu, steps,
                                 {std::move(recorder), std::move(activity), std::move(failed)});
          },
          "communicator"_a.none(), "signature"_a.none(), "steps"_a, "recorder"_a = nb::none(),
          "activity"_a = nb::none(), "failed"_a = nb::none(), nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>())
      .def("run", &HostRound::run, "tensors"_a)
      .def("run_like_last", &HostRound::run_like_last, "x"_a.none());

  nb::class_<Unlocked<Exchange>>(m, "Exchange", "Stages that are in flight together.")
      .def(
          "__init__",
          [](Unlocked<Exchange>* self, HostCommunicator& communicator, const Signature& signature,
             const Calls& calls) {
            const std::vector<StageCall> bound = stage_calls(calls);
            nb::gil_scoped_release release;
            new (self) Unlocked<Exchange>(communicator, signature, bound);
          },
          "communicator"_a, "signature"_a, "calls"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def(
          "wait", [](Unlocked<Exchange>& self, size_t call) { self.wait(call); }, "call"_a,
          nb::call_guard<nb::gil_scoped_release>());

  nb::class_<Unlocked<Pieces>>(m, "Pieces",
                               "A message in flight, made of several pieces of memory.")
      .def(
          "__init__",
          [](Unlocked<Pieces>* self, HostCommunicator& communicator, const Signature& signature,
             bool sends, const std::vector<int>& peers, const std::vector<gpudist::Piece>& pieces) {
            nb::gil_scoped_release release;
            new (self) Unlocked<Pieces>(communicator, signature,
                                        sends ? Transfer::Kind::kSend : Transfer::Kind::kReceive,
                                        peers, pieces);
          },
          "communicator"_a, "signature"_a, "sends"_a, "peers"_a, "pieces"_a, nb::keep_alive<1, 2>(),
          nb::keep_alive<1, 3>())
      .def(
          "wait", [](Unlocked<Pieces>& self) { self.wait(); },
          nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "run_local",
      [](const BoundStage& stage, uintptr_t input, uintptr_t output) {
        nb::gil_scoped_release release;
        gpudist::run_local_stage(stage_call(stage, input, output));
      },
      "stage"_a, "input"_a, "output"_a, "Run a stage that exchanges no messages.");

  gpudist::bind_nccl(m);

  m.attr("FAILURE_BYTES") = gpudist::HostCommunicator::kFailureBytes;

  gpudist::bind_environment(m);
  gpudist::bind_memory(m);
  gpudist::bind_norm(m);
  gpudist::bind_random(m);
}
