#include "nccl/nccl_world.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "core/errors.h"
#include "device/cuda_driver.h"
#include "device/device.h"

namespace gpudist {

namespace {

using Buffers = std::array<char*, kBuffers>;
using Lock = std::lock_guard<std::mutex>;
using RecursiveLock = std::lock_guard<std::recursive_mutex>;
constexpr int64_t kAlignment = 256;
constexpr int kAttempts = 3;
// Time to close a world in its destructor.
constexpr double kLastSeconds = 0.5;
constexpr size_t kMebibyte = 1 << 20;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void check_code(const DeviceApi& api, int device) {
  const int error = api.check_kernels();
  if (error != kCudaNoBinary && error != kCudaNewerPtx) {
    return check_device(api, error, "loading the kernels");
  }
  int capability = 0, compiler = 0, driver = 0;
  check_device(api, api.capability(device, &capability), "asking for a GPU's capability");
  api.compiler_version(&compiler);
  api.driver_version(&driver);
  const std::string gpu = "GPU " + std::to_string(device) + " has compute capability " +
                          std::to_string(capability / 10) + "." + std::to_string(capability % 10);
  if (error == kCudaNewerPtx) {
    throw NotBuiltError(gpu + ", whose code the driver makes from PTX of CUDA " +
                        cuda_version_text(compiler) + ", but this driver supports CUDA up to " +
                        cuda_version_text(driver) + ": update the driver");
  }
  throw NotBuiltError(gpu +
                      ", for which this build of gpudist has no code: it needs 8.0 or later; use "
                      "another GPU, or GPUDIST_TRANSPORT=host for ranks on CPUs");
}

// In host memory, so that it can be set whatever the device is doing.
PinnedMemory failed_word(const DeviceApi& api, int device) {
  const DeviceGuard guard(api, device);
  return PinnedMemory(api, sizeof(uint32_t));
}

bool is_message(const WireCall& call) {
  return call.kind == WireKind::kSend || call.kind == WireKind::kReceive;
}

}  // namespace

NcclWorld::NcclWorld(const NcclApi* nccl, const DeviceApi& device_api, int device, int rank,
                     double timeout_s, CheckSignals check_signals, MakeRoom make_room)
    : device_api_(device_api),
      device_(device),
      on_{nccl, &device_api, device},
      rank_(rank),
      check_signals_(std::move(check_signals)),
      make_room_(std::move(make_room)),
      staging_([this](size_t bytes) { return allocate(bytes); },
               [this](char* memory) {
                 operations_->give_back(memory, [this] { watchdog_.check(); }, check_signals_);
               },
               [this](char* memory) { operations_->keep(memory); }),
      operations_(std::make_shared<Operations>(device_api, device)),
      watchdog_(
          *operations_, failed_word(device_api, device), timeout_s, [this] { return find_error(); },
          [this] { abort_all(); }) {
  const DeviceGuard guard(device_api_, device_);
  check_code(device_api_, device_);
  check_device(device_api_, device_api_.create_stream(&beside_), "creating a stream");
}

NcclWorld::~NcclWorld() {
  close(kLastSeconds);
}

std::string NcclWorld::new_id() const {
  NcclUniqueId id;
  check_nccl(*on_.nccl, on_.nccl->get_unique_id(&id), nullptr, "ncclGetUniqueId");
  return std::string(id.internal, sizeof(id.internal));
}

NcclCommunicator* NcclWorld::connect(const std::string& text, std::vector<int> members) {
  NcclUniqueId id;
  if (text.size() != sizeof(id.internal)) throw TransportError("a unique id has 128 bytes");
  std::memcpy(id.internal, text.data(), text.size());
  const auto found = std::find(members.begin(), members.end(), rank_);
  if (found == members.end()) throw TransportError("this rank is not a member");
  const int rank = static_cast<int>(found - members.begin());
  return keep(NcclCommunicator::make(on_, id, std::move(members), rank, [this] { look(); }));
}

NcclCommunicator* NcclWorld::split(NcclCommunicator& parent, int color, int key,
                                   std::vector<int> members) {
  const Entry entered(*this, "splitting a communicator");
  operations_->wait_for_all([this] { watchdog_.check(); }, check_signals_);
  return keep(parent.split(on_, color, key, std::move(members), [this] { look(); }));
}

NcclCommunicator* NcclWorld::keep(std::unique_ptr<NcclCommunicator> communicator) {
  if (communicator == nullptr) return nullptr;
  const Lock locked(communicators_mutex_);
  if (aborting_ != nullptr) {
    abort_communicators(on_, {communicator->take()});
    throw WorldFailed();
  }
  communicators_.push_back(std::move(communicator));
  return communicators_.back().get();
}

NcclCommunicator* NcclWorld::world() const {
  const Lock locked(communicators_mutex_);
  return communicators_.empty() ? nullptr : communicators_.front().get();
}

void NcclWorld::look() {
  watchdog_.check();
  check_signals_();
}

uint64_t NcclWorld::enqueue(const std::string& label, DeviceStream stream, const Put& put) {
  const DeviceGuard guard(device_api_, device_);
  const uint64_t operation = begin(label);
  try {
    uint64_t capture = 0;
    check_device(device_api_, device_api_.capture_id(stream, &capture), "asking for a capture");
    // NCCL kernels on two streams that wait for each other would deadlock, and operations share
    // staging memory: run them in order.
    if (capture == 0) {
      operations_->follow(stream);
      put(capture);
      operations_->enqueued(operation, stream);
    } else {
      put_captured(capture, stream, put);
      operations_->drop(operation);
    }
  } catch (...) {
    operations_->drop(operation);
    watchdog_.check();  // if the world has failed, this error is only a consequence
    throw;
  }
  watchdog_.check();
  return operation;
}

void NcclWorld::watch(const std::string& label, DeviceStream stream,
                      const std::function<void()>& put) {
  const Entry entered(*this, label);
  enqueue(label, stream, [&](uint64_t) { put(); });
}

void NcclWorld::put_captured(uint64_t capture, DeviceStream stream, const Put& put) {
  if (const auto last = captured_.find(capture); last != captured_.end()) {
    check_device(device_api_, device_api_.wait_event(stream, last->second), "waiting for an event");
  }
  put(capture);
  DeviceEvent& last = captured_[capture];
  if (last == nullptr) last = take_event();
  check_device(device_api_, device_api_.record_event(last, stream), "recording an event");
}

void NcclWorld::check_open(const std::string& label) const {
  if (is_closed_) {
    throw TransportError("'" + label + "': the nccl transport of rank " + std::to_string(rank_) +
                         " was closed");
  }
  watchdog_.check();
}

uint64_t NcclWorld::begin(const std::string& label) {
  check_open(label);
  return operations_->begin(label);
}

NcclWorld::Entry::Entry(NcclWorld& world, const std::string& label)
    : world(world), alone(world.mutex_, std::try_to_lock) {
  if (!alone.owns_lock()) {
    if (!world.is_closed_ && !world.watchdog_.has_failed()) throw SimultaneousEntry(world.rank_);
    alone.lock();
  }
  if (!world.is_inside_) inside = std::shared_lock<std::shared_mutex>(*world.on_.inside);
  world.check_open(label);  // from here on communicators stay alive until this thread leaves
  if (world.is_inside_) {
    throw TransportError(
        "rank " + std::to_string(world.rank_) + " called '" + label +
        "' inside another operation of this world, from a signal handler or a finalizer, so the "
        "order of its messages is undefined: let the handler set a flag, and call operators where "
        "every rank does");
  }
  world.is_inside_ = true;
}

void NcclWorld::run(const Signature& signature, const std::vector<DeviceCall>& calls,
                    DeviceStream stream) {
  const Entry entered(*this, signature.label);
  agree(signature, calls, stream);
  ++rounds_;
  enqueue(signature.label, stream, [&](uint64_t capture) {
    std::vector<DeviceStage*> stages;
    stages.reserve(calls.size());
    int64_t bytes = 0;
    for (const DeviceCall& call : calls) {
      stages.push_back(&call.stage->under(capture));
      bytes += aligned(stages.back()->sent_bytes) + aligned(stages.back()->received_bytes);
    }
    char* staging = bytes == 0 ? nullptr : staging_.of(capture != 0, bytes);
    std::vector<Buffers> buffers;
    buffers.reserve(calls.size());
    std::vector<WireCall> wire_calls;
    for (size_t i = 0; i < calls.size(); ++i) {
      DeviceStage& stage = *stages[i];
      char* const received = staging + aligned(stage.sent_bytes);
      buffers.push_back({calls[i].input, calls[i].output, staging, received});
      staging = received + aligned(stage.received_bytes);
      stage.before.launch(buffers.back(), nullptr, stream);
      for (const WireStep& step : stage.steps) wire_calls.push_back(step.at(buffers.back()));
    }
    group(wire_calls, stream);
    for (size_t i = 0; i < calls.size(); ++i) {
      stages[i]->after.launch(buffers[i], watchdog_.failed_word(), stream);
    }
  });
}

void NcclWorld::run_calls(const Signature& signature, std::vector<WireCall> calls,
                          DeviceStream stream) {
  const Entry entered(*this, signature.label);
  agree(signature, calls, stream);
  enqueue(signature.label, stream, [&](uint64_t) {
    group(calls, stream);
    for (const WireCall& call : calls) guard(call, stream);
  });
}

void NcclWorld::guard(const WireCall& call, DeviceStream stream) {
  if (call.to == nullptr || call.kind == WireKind::kSend) return;
  int64_t bytes = static_cast<int64_t>(call.count) * nccl_item_bytes(call.dtype);
  if (call.kind == WireKind::kAllGather) bytes *= call.communicator->members().size();
  auto& made = guards_[bytes];
  if (made == nullptr) {
    CombineBox box{{bytes}, {{Buffer::kOutput, 0, {1}}}, true};
    made = std::make_unique<DeviceCombine>(operations_,
                                           CombinePlan(Dtype::kUint8, 0, {std::move(box)}));
  }
  made->launch({nullptr, static_cast<char*>(call.to), nullptr, nullptr}, watchdog_.failed_word(),
               stream);
}

void NcclWorld::run_local(const std::vector<DeviceCall>& calls, DeviceStream stream) {
  const DeviceGuard guard(device_api_, device_);
  for (const DeviceCall& call : calls) {
    const Buffers buffers{call.input, call.output, nullptr, nullptr};
    call.stage->before.launch(buffers, nullptr, stream);
    call.stage->after.launch(buffers, nullptr, stream);
  }
}

DeviceEvent NcclWorld::take_event() {
  DeviceEvent event = nullptr;
  if (idle_events_.empty()) {
    check_device(device_api_, device_api_.create_event(&event), "creating an event");
  } else {
    event = idle_events_.back();
    idle_events_.pop_back();
  }
  return event;
}

DeviceEvent NcclWorld::start(const Signature& signature, const std::vector<DeviceCall>& calls,
                             DeviceStream stream) {
  DeviceEvent event = nullptr;
  {
    const Entry entered(*this, signature.label);
    const DeviceGuard guard(device_api_, device_);
    event = take_event();
    has_started_ = true;
  }
  try {
    const DeviceGuard guard(device_api_, device_);
    check_device(device_api_, device_api_.record_event(event, stream), "recording an event");
    check_device(device_api_, device_api_.wait_event(beside_, event), "waiting for an event");
    run(signature, calls, beside_);
    check_device(device_api_, device_api_.record_event(event, beside_), "recording an event");
  } catch (...) {
    const RecursiveLock locked(mutex_);
    idle_events_.push_back(event);
    throw;
  }
  const RecursiveLock locked(mutex_);
  started_[event] = stream;
  return event;
}

void NcclWorld::join(DeviceEvent event, DeviceStream stream) {
  const RecursiveLock locked(mutex_);
  const DeviceGuard guard(device_api_, device_);
  check_device(device_api_, device_api_.wait_event(stream, event), "waiting for an event");
  // After this, tensors of the operation may be freed on the stream they were allocated for.
  const DeviceStream started = started_[event];
  started_.erase(event);
  if (started != stream) {
    check_device(device_api_, device_api_.wait_event(started, event), "waiting for an event");
  }
  idle_events_.push_back(event);
  watchdog_.check();
}

void NcclWorld::settle(DeviceStream stream) {
  const RecursiveLock locked(mutex_);
  if (!has_started_) return;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    try {
      const DeviceGuard guard(device_api_, device_);
      DeviceEvent event = take_event();
      idle_events_.push_back(event);
      check_device(device_api_, device_api_.record_event(event, beside_), "recording an event");
      check_device(device_api_, device_api_.wait_event(stream, event), "waiting for an event");
      return;
    } catch (const TransportError&) {
      continue;  // an earlier failure may be the cause of this one
    }
  }
}

void NcclWorld::synchronize(DeviceStream stream) {
  uint64_t operation = 0;
  {
    const RecursiveLock locked(mutex_);
    operation = enqueue("synchronize", stream, [](uint64_t capture) {
      if (capture == 0) return;
      throw RefusedCapture(
          "this call waits for the GPU, as what ranks agree on at the first call of an operator "
          "does, "
          "and cannot be part of a graph; call the operator once before the capture");
    });
  }
  operations_->wait(operation, [this] { watchdog_.check(); }, check_signals_);
}

void NcclWorld::group(std::vector<WireCall>& calls, DeviceStream stream) {
  if (calls.empty()) return;
  NcclCommunicator* const world = this->world();
  for (WireCall& call : calls) {
    if (call.communicator == nullptr) call.communicator = world;
    if (call.communicator == nullptr)
      throw TransportError("a world of one rank has no peer to send to");
  }
  // Kernels of several communicators run one after the other, in the same order on every rank: the
  // world's, which carries the messages, then the others sorted by their lists of members. NCCL
  // keeps this order until 2.25; from 2.26 on it has one of its own, also the same on every rank.
  std::stable_sort(calls.begin(), calls.end(), [=](const WireCall& a, const WireCall& b) {
    if (is_message(a) || is_message(b)) return is_message(a) && !is_message(b);
    const bool is_first = a.communicator == world;
    if (is_first != (b.communicator == world)) return is_first;
    return a.communicator->members() < b.communicator->members();
  });
  check_nccl(*on_.nccl, on_.nccl->group_start(), nullptr, "ncclGroupStart");
  try {
    for (const WireCall& wire_call : calls) call(wire_call, stream);
  } catch (...) {
    on_.nccl->group_end();
    throw;
  }
  check_nccl(*on_.nccl, on_.nccl->group_end(), world == nullptr ? nullptr : world->handle(),
             "ncclGroupEnd");
}

void NcclWorld::call(const WireCall& c, DeviceStream stream) {
  const NcclApi& nccl = *on_.nccl;
  const NcclComm comm = c.communicator->handle();
  const auto check = [&](int result, const char* what) { check_nccl(nccl, result, comm, what); };
  switch (c.kind) {
    case WireKind::kSend:
      return check(nccl.send(c.from, c.count, c.dtype, c.peer, comm, stream), "ncclSend");
    case WireKind::kReceive:
      return check(nccl.recv(c.to, c.count, c.dtype, c.peer, comm, stream), "ncclRecv");
    case WireKind::kBroadcast:
      return check(nccl.broadcast(c.from, c.to, c.count, c.dtype, c.peer, comm, stream),
                   "ncclBroadcast");
    case WireKind::kReduce:
      return check(nccl.reduce(c.from, c.to, c.count, c.dtype, c.op, c.peer, comm, stream),
                   "ncclReduce");
    case WireKind::kAllReduce:
      return check(nccl.all_reduce(c.from, c.to, c.count, c.dtype, c.op, comm, stream),
                   "ncclAllReduce");
    case WireKind::kAllGather:
      return check(nccl.all_gather(c.from, c.to, c.count, c.dtype, comm, stream), "ncclAllGather");
    case WireKind::kReduceScatter:
      return check(nccl.reduce_scatter(c.from, c.to, c.count, c.dtype, c.op, comm, stream),
                   "ncclReduceScatter");
  }
}

std::string NcclWorld::find_error() {
  const Lock locked(communicators_mutex_);
  for (const auto& communicator : communicators_) {
    std::string error = communicator->async_error();
    if (!error.empty()) return error;
  }
  return "";
}

char* NcclWorld::allocate(size_t bytes) {
  const RelaxedCapture relaxed(device_api_);
  void* memory = nullptr;
  if (device_api_.allocate(&memory, bytes) != 0) {
    make_room_();
    const std::string text =
        "allocating " + std::to_string(bytes / kMebibyte) + " MiB for messages on GPU " +
        std::to_string(device_) +
        ", outside torch's memory, also after torch's cache was emptied (use smaller blocks, or "
        "leave torch less: torch.cuda.set_per_process_memory_fraction)";
    check_device(device_api_, device_api_.allocate(&memory, bytes), text.c_str());
  }
  return static_cast<char*>(memory);
}

}  // namespace gpudist
