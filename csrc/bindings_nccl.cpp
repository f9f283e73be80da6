// Python bindings of the NCCL transport.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "bindings.h"
#include "core/errors.h"
#include "core/round.h"
#include "nccl/nccl_world.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace gpudist {

namespace {

using Views = std::vector<std::tuple<Buffer, int64_t, std::vector<int64_t>>>;
// Shape, destination, summands, and whether the cells already have their values.
using Boxes = std::vector<std::tuple<std::vector<int64_t>, Views, bool>>;
using Steps = std::vector<std::tuple<WireKind, NcclCommunicator*, int, Buffer, int64_t, Buffer,
                                     int64_t, size_t, int, int>>;
using Calls = std::vector<std::tuple<DeviceStage*, uintptr_t, uintptr_t>>;
using WireCalls = std::vector<
    std::tuple<WireKind, NcclCommunicator*, int, uintptr_t, uintptr_t, size_t, int, int>>;

CombinePlan combine_plan(Dtype dtype, double fill, const Boxes& boxes) {
  std::vector<CombineBox> combined;
  combined.reserve(boxes.size());
  for (const auto& [shape, views, already_there] : boxes) {
    CombineBox box{shape, {}, already_there};
    for (const auto& [buffer, offset, strides] : views) {
      box.views.push_back({buffer, offset, strides});
    }
    combined.push_back(std::move(box));
  }
  return CombinePlan(dtype, fill, combined);
}

DeviceCall device_call(DeviceStage& stage, uintptr_t input, uintptr_t output) {
  return {&stage, reinterpret_cast<char*>(input), reinterpret_cast<char*>(output)};
}

std::vector<DeviceCall> device_calls(const Calls& calls) {
  std::vector<DeviceCall> bound;
  bound.reserve(calls.size());
  for (const auto& [stage, input, output] : calls) {
    bound.push_back(device_call(*stage, input, output));
  }
  return bound;
}

// Let backward passes that this thread starts run in it. Otherwise each device has a thread for
// them, and nothing orders their messages.
void keep_backward() {
  thread_local bool has_kept = false;
  if (has_kept) return;
  nb::module_::import_("torch.autograd").attr("set_multithreading_enabled")(false);
  has_kept = true;
}

// Wire of a Round on a GPU: stages run on the stream that is current at the call.
struct DeviceWire {
  using Stage = DeviceStage;
  using Call = DeviceCall;
  using Context = DeviceStream;
  static constexpr bool kWaits = false;

  static Call call(Stage& stage, uintptr_t input, uintptr_t output) {
    return device_call(stage, input, output);
  }
  Context context() const {
    keep_backward();
    return reinterpret_cast<DeviceStream>(nb::cast<uintptr_t>(current_stream()));
  }
  PyObject* held() const { return current_stream.ptr(); }
  void run(const std::vector<Call>& calls, Context stream) const {
    if (signature != nullptr) {
      world->run(*signature, calls, stream);
    } else {
      world->run_local(calls, stream);
    }
  }

  NcclWorld* world;
  const Signature* signature;
  nb::object current_stream;
};

using DeviceRound = Round<DeviceWire>;

const char* name_of(Watchdog::Problem::Cause kind) {
  switch (kind) {
    case Watchdog::Problem::Cause::kExpired: return "expired";
    case Watchdog::Problem::Cause::kBroken: return "broken";
    default: return "ended";
  }
}

DeviceStream stream_at(uintptr_t handle) {
  return reinterpret_cast<DeviceStream>(handle);
}

}  // namespace

void bind_nccl(nb::module_& m) {
  nb::enum_<Buffer>(m, "Buffer")
      .value("input", Buffer::kInput)
      .value("output", Buffer::kOutput)
      .value("sent", Buffer::kSent)
      .value("received", Buffer::kReceived);

  nb::enum_<WireKind>(m, "WireKind")
      .value("send", WireKind::kSend)
      .value("receive", WireKind::kReceive)
      .value("broadcast", WireKind::kBroadcast)
      .value("reduce", WireKind::kReduce)
      .value("all_reduce", WireKind::kAllReduce)
      .value("all_gather", WireKind::kAllGather)
      .value("reduce_scatter", WireKind::kReduceScatter);

  m.def(
      "device_missing",
      [] {
        try {
          device_api("");
        } catch (const NotBuiltError& error) {
          return std::string(error.what());
        }
        return std::string();
      },
      "Return why this build cannot use GPUs; empty if it can.");

  nb::class_<NcclCommunicator>(m, "NcclCommunicator", "A communicator, owned by its world.");

  nb::class_<DeviceStage>(m, "DeviceStage", "A stage of a plan on a GPU.")
      .def(
          "__init__",
          [](DeviceStage* self, const NcclWorld& world, Dtype dtype, double fill,
             const Boxes& before, const Boxes& after, const Steps& steps, int64_t sent_bytes,
             int64_t received_bytes, DeviceStage* captured) {
            std::vector<WireStep> wire_steps;
            for (const auto& [kind, communicator, peer, from, from_offset, to, to_offset, count,
                              item, op] : steps) {
              wire_steps.push_back(
                  {kind, communicator, peer, from, from_offset, to, to_offset, count, item, op});
            }
            new (self) DeviceStage(world.operations(), combine_plan(dtype, 0, before),
                                   combine_plan(dtype, fill, after), std::move(wire_steps),
                                   sent_bytes, received_bytes, captured);
          },
          "world"_a, "dtype"_a, "fill"_a, "before"_a, "after"_a, "steps"_a, "sent_bytes"_a,
          "received_bytes"_a, "captured"_a.none() = nb::none(), nb::keep_alive<1, 10>());

  nb::class_<NcclWorld>(m, "NcclWorld", "One rank of a world over NCCL.")
      .def(
          "__init__",
          [](NcclWorld* self, int rank, int size, int device, double timeout_s,
             const std::string& nccl_library, const std::vector<std::string>& wheel_libraries,
             const std::string& device_library, nb::object make_room) {
            const DeviceApi& api = device_api(device_library.c_str());
            const bool needs_nccl = size > 1 || !nccl_library.empty();
            const NcclApi* nccl = needs_nccl ? &load_nccl(nccl_library, wheel_libraries) : nullptr;
            new (self) NcclWorld(nccl, api, device, rank, timeout_s, check_signals,
                                 [make_room = std::move(make_room)] {
                                   const nb::gil_scoped_acquire acquire;
                                   if (!make_room.is_none()) make_room();
                                 });
          },
          "rank"_a, "size"_a, "device"_a, "timeout_s"_a, "nccl_library"_a, "wheel_libraries"_a,
          "device_library"_a, "make_room"_a.none() = nb::none(),
          "`nccl_library` may be empty; a world of one needs no NCCL and has it where it is named.")
      .def("new_id",
           [](const NcclWorld& self) {
             const std::string id = self.new_id();
             return nb::bytes(id.data(), id.size());
           })
      .def(
          "connect",
          [](NcclWorld& self, const nb::bytes& id, std::vector<int> members) {
            const std::string text(id.c_str(), id.size());
            const nb::gil_scoped_release release;
            return self.connect(text, std::move(members));
          },
          "id"_a, "members"_a, nb::rv_policy::reference_internal)
      .def("fold", &NcclWorld::fold, "peers"_a, "number"_a, "what"_a)
      .def("split", &NcclWorld::split, "parent"_a, "color"_a, "key"_a, "members"_a,
           nb::rv_policy::reference_internal, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "run_calls",
          [](NcclWorld& self, const Signature& signature, const WireCalls& calls,
             uintptr_t stream) {
            keep_backward();
            std::vector<WireCall> wire_calls;
            for (const auto& [kind, communicator, peer, from, to, count, dtype, op] : calls) {
              wire_calls.push_back({kind, communicator, peer, reinterpret_cast<const void*>(from),
                                    reinterpret_cast<void*>(to), count, dtype, op});
            }
            const nb::gil_scoped_release release;
            self.run_calls(signature, std::move(wire_calls), stream_at(stream));
          },
          "signature"_a, "calls"_a, "stream"_a)
      .def(
          "start",
          [](NcclWorld& self, const Signature& signature, const Calls& calls, uintptr_t stream) {
            keep_backward();
            const std::vector<DeviceCall> bound = device_calls(calls);
            const nb::gil_scoped_release release;
            return reinterpret_cast<uintptr_t>(self.start(signature, bound, stream_at(stream)));
          },
          "signature"_a, "calls"_a, "stream"_a)
      .def(
          "join",
          [](NcclWorld& self, uintptr_t event, uintptr_t stream) {
            self.join(reinterpret_cast<DeviceEvent>(event), stream_at(stream));
          },
          "event"_a, "stream"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "settle", [](NcclWorld& self, uintptr_t stream) { self.settle(stream_at(stream)); },
          "stream"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "synchronize",
          [](NcclWorld& self, uintptr_t stream) { self.synchronize(stream_at(stream)); },
          "stream"_a, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "watch_process",
          [](NcclWorld& self, int rank, int pid) { self.watchdog().watch_process(rank, pid); },
          "rank"_a, "pid"_a)
      .def(
          "begin", [](NcclWorld& self, const std::string& label) { return self.begin(label); },
          "label"_a, "Start watching an operation outside streams; return its number for drop().")
      .def(
          "enqueue",
          [](NcclWorld& self, const std::string& label, uintptr_t stream, const nb::callable& put) {
            const nb::gil_scoped_release release;
            self.watch(label, stream_at(stream), [&] {
              const nb::gil_scoped_acquire acquire;
              put();
            });
          },
          "label"_a, "stream"_a, "put"_a, "Watch what put() enqueues on the stream.")
      .def(
          "drop", [](NcclWorld& self, uint64_t operation) { self.operations()->drop(operation); },
          "operation"_a)
      .def(
          "next_problem",
          [](NcclWorld& self) -> std::optional<std::tuple<std::string, std::string, int>> {
            const auto problem = self.watchdog().next_problem();
            if (!problem) return std::nullopt;
            return std::make_tuple(std::string(name_of(problem->cause)), problem->text,
                                   problem->rank);
          },
          "Return each problem once: 'expired' and the operation, 'broken' and the error, or "
          "'ended' and the rank whose process ended.")
      .def("oldest_s", [](NcclWorld& self) { return self.operations()->oldest_s(); })
      .def(
          "lines", [](NcclWorld& self, size_t last) { return self.operations()->lines(last); },
          "last"_a)
      .def(
          "fail", [](NcclWorld& self, const std::string& text) { self.watchdog().fail(text); },
          "text"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("failure", [](NcclWorld& self) { return self.watchdog().failure(); })
      .def(
          "failed_word",
          [](NcclWorld& self) {
            return reinterpret_cast<uintptr_t>(self.watchdog().failed_word());
          },
          "Return the address of a word that the device reads: nonzero once the world has failed.")
      .def("rounds", &NcclWorld::rounds)
      .def("checks", &NcclWorld::checks)
      .def("set_checks", &NcclWorld::set_checks, "checks"_a)
      .def("set_remembered", &NcclWorld::set_remembered, "most"_a)
      .def("staging_bytes", &NcclWorld::staging_bytes)
      .def("close", &NcclWorld::close, "seconds"_a, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<DeviceRound>(m, "DeviceRound", nb::type_slots(DeviceRound::slots()),
                          "One stage of each of several movements, on a GPU.")
      .def(
          "__init__",
          [](DeviceRound* self, NcclWorld& world, const Signature* signature, int device,
             const std::vector<nb::object>& steps, nb::object current_stream, nb::object recorder,
             nb::object activity, nb::object failed) {
            new (self) DeviceRound({&world, signature, std::move(current_stream)}, device, steps,
                                   {std::move(recorder), std::move(activity), std::move(failed)});
          },
          "world"_a, "signature"_a.none(), "device"_a, "steps"_a, "current_stream"_a,
          "recorder"_a = nb::none(), "activity"_a = nb::none(), "failed"_a = nb::none(),
          nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
      .def("run", &DeviceRound::run, "tensors"_a)
      .def("run_like_last", &DeviceRound::run_like_last, "x"_a.none());
}

}  // namespace gpudist
