#include "nccl_world.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>

#include "check.h"
#include "device.h"

namespace gpudist {

namespace {

using Buffers = std::array<char*, kBuffers>;
using Lock = std::lock_guard<std::mutex>;
constexpr int64_t kAlignment = 256;
// A call of NCCL's that takes longer waits for a peer.
constexpr auto kCallTime = std::chrono::milliseconds(50);
constexpr int kAttempts = 3;

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// What std::timed_mutex does, in a way that the thread sanitizer understands.
std::unique_lock<std::mutex> lock_within(std::mutex& mutex, std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  for (int ms = 0; !lock.owns_lock() && ms < time.count(); ++ms) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    static_cast<void>(lock.try_lock());
  }
  return lock;
}

bool is_message(const WireCall& call) {
  return call.kind == WireKind::kSend || call.kind == WireKind::kReceive;
}

}  // namespace

NcclWorld::NcclWorld(const NcclApi* nccl, const DeviceApi& device_api, int device, int rank,
                     int size, double timeout_s, CheckSignals check_signals)
    : nccl_(nccl),
      device_api_(device_api),
      device_(device),
      rank_(rank),
      size_(size),
      check_signals_(std::move(check_signals)),
      staging_(
          device_api, [this](size_t bytes) { return allocate(bytes); },
          [this](char* memory) { release(memory); }),
      watchdog_(
          device_api, device, timeout_s, [this] { return find_error(); }, [this] { abort_all(); }) {
  const DeviceGuard guard(device_api_, device_);
  check_device(device_api_, device_api_.create_stream(&beside_), "creating a stream");
  check_device(device_api_, device_api_.create_event(&last_), "creating an event");
}

NcclWorld::~NcclWorld() {
  close(0);
  watchdog_.stop();
  const DeviceGuard guard(device_api_, device_);
  for (DeviceEvent event : idle_events_) device_api_.destroy_event(event);
  device_api_.destroy_event(last_);
  device_api_.destroy_stream(beside_);
}

std::string NcclWorld::new_id() const {
  NcclUniqueId id;
  check_nccl(*nccl_, nccl_->get_unique_id(&id), nullptr, "ncclGetUniqueId");
  return std::string(id.internal, sizeof(id.internal));
}

NcclCommunicator* NcclWorld::connect(const std::string& text, std::vector<int> members) {
  NcclUniqueId id;
  if (text.size() != sizeof(id.internal)) throw TransportError("a unique id has 128 bytes");
  std::memcpy(id.internal, text.data(), text.size());
  const auto found = std::find(members.begin(), members.end(), rank_);
  if (found == members.end()) throw TransportError("this rank is not a member");
  const int rank = static_cast<int>(found - members.begin());
  return keep(NcclCommunicator::make(*nccl_, device_api_, device_, id, std::move(members), rank,
                                     [this] { look(); }));
}

NcclCommunicator* NcclWorld::adopt(uintptr_t comm, std::vector<int> members) {
  return keep(
      NcclCommunicator::adopt(*nccl_, reinterpret_cast<NcclComm>(comm), std::move(members)));
}

NcclCommunicator* NcclWorld::split(NcclCommunicator& parent, int color, int key,
                                   std::vector<int> members) {
  const auto locked = enter();
  return keep(
      parent.split(device_api_, device_, color, key, std::move(members), [this] { look(); }));
}

NcclCommunicator* NcclWorld::keep(std::unique_ptr<NcclCommunicator> communicator) {
  if (communicator == nullptr) return nullptr;
  const std::lock_guard<std::mutex> locked(communicators_mutex_);
  if (watchdog_.has_failed()) throw WorldFailed();  // and it is aborted as it goes
  communicators_.push_back(std::move(communicator));
  return communicators_.back().get();
}

NcclCommunicator* NcclWorld::world() const {
  const std::lock_guard<std::mutex> locked(communicators_mutex_);
  return communicators_.empty() ? nullptr : communicators_.front().get();
}

void NcclWorld::look() {
  watchdog_.check();
  check_signals_();
}

uint64_t NcclWorld::enqueue(const std::string& label, DeviceStream stream, const Put& put) {
  if (is_closed_) {
    throw TransportError("'" + label + "': the nccl transport of rank " + std::to_string(rank_) +
                         " was closed");
  }
  const DeviceGuard guard(device_api_, device_);
  const uint64_t operation = watchdog_.begin(label);
  try {
    uint64_t capture = 0;
    check_device(device_api_, device_api_.capture_id(stream, &capture), "asking for a capture");
    // Kernels of NCCL's that wait for one another on two streams would be a deadlock.
    if (capture == 0 && has_last_ && last_stream_ != stream) {
      check_device(device_api_, device_api_.wait_event(stream, last_), "waiting for an event");
    }
    put(capture);
    if (capture == 0) {
      check_device(device_api_, device_api_.record_event(last_, stream), "recording an event");
      last_stream_ = stream;
      has_last_ = true;
    }
    watchdog_.enqueued(operation, stream, capture != 0);
  } catch (...) {
    watchdog_.drop(operation);
    watchdog_.check();  // where the world has failed, this is only a consequence
    throw;
  }
  watchdog_.check();
  return operation;
}

std::unique_lock<std::mutex> NcclWorld::enter() {
  std::unique_lock<std::mutex> locked(mutex_, std::try_to_lock);
  if (!locked.owns_lock()) {
    // The end of the world takes it too.
    if (!is_closed_ && !watchdog_.has_failed()) throw SimultaneousEntry(rank_);
    locked.lock();
  }
  return locked;
}

void NcclWorld::run(const Signature& signature, const std::vector<DeviceCall>& calls,
                    DeviceStream stream) {
  const auto locked = enter();
  agree(signature, calls, stream);
  ++rounds_;
  enqueue(signature.label, stream, [&](uint64_t capture) {
    int64_t bytes = 0;
    for (const DeviceCall& call : calls) {
      bytes += aligned(call.stage->sent_bytes) + aligned(call.stage->received_bytes);
    }
    char* staging = bytes == 0 ? nullptr : staging_.of(stream, capture, bytes);
    std::vector<Buffers> buffers;
    buffers.reserve(calls.size());
    std::vector<WireCall> wire_calls;
    for (const DeviceCall& call : calls) {
      char* const received = staging + aligned(call.stage->sent_bytes);
      buffers.push_back({call.input, call.output, staging, received});
      staging = received + aligned(call.stage->received_bytes);
      call.stage->before.launch(buffers.back(), nullptr, stream);
      for (const WireStep& step : call.stage->steps) wire_calls.push_back(step.at(buffers.back()));
    }
    group(wire_calls, stream);
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i].stage->after.launch(buffers[i], watchdog_.failed_word(), stream);
    }
  });
}

void NcclWorld::run_calls(const Signature& signature, std::vector<WireCall> calls,
                          DeviceStream stream) {
  const auto locked = enter();
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
    made = std::make_unique<DeviceCombine>(device_api_,
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
    const auto locked = enter();
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
    const Lock locked(mutex_);
    idle_events_.push_back(event);
    throw;
  }
  return event;
}

void NcclWorld::join(DeviceEvent event, DeviceStream stream) {
  const Lock locked(mutex_);
  const DeviceGuard guard(device_api_, device_);
  check_device(device_api_, device_api_.wait_event(stream, event), "waiting for an event");
  idle_events_.push_back(event);
  watchdog_.check();
}

void NcclWorld::settle(DeviceStream stream) {
  const Lock locked(mutex_);
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
      continue;  // there is a failure already, of which this may be a part
    }
  }
}

void NcclWorld::synchronize(DeviceStream stream) {
  uint64_t operation = 0;
  {
    const Lock locked(mutex_);
    operation = enqueue("synchronize", stream, [](uint64_t) {});
  }
  watchdog_.wait(operation, check_signals_);
}

void NcclWorld::group(std::vector<WireCall>& calls, DeviceStream stream) {
  if (calls.empty()) return;
  NcclCommunicator* const world = this->world();
  for (WireCall& call : calls) {
    if (call.communicator == nullptr) call.communicator = world;
    if (call.communicator == nullptr) throw TransportError("a world of one has nobody to talk to");
  }
  // Kernels of several communicators run one after the other, on every rank in the same order:
  // messages first, then collectives by their lists of members.
  std::stable_sort(calls.begin(), calls.end(), [](const WireCall& a, const WireCall& b) {
    if (is_message(a) || is_message(b)) return is_message(a) && !is_message(b);
    return a.communicator->members() < b.communicator->members();
  });
  check_nccl(*nccl_, nccl_->group_start(), nullptr, "ncclGroupStart");
  try {
    for (const WireCall& wire_call : calls) call(wire_call, stream);
  } catch (...) {
    nccl_->group_end();
    throw;
  }
  check_nccl(*nccl_, nccl_->group_end(), world == nullptr ? nullptr : world->handle(),
             "ncclGroupEnd");
}

void NcclWorld::call(const WireCall& c, DeviceStream stream) {
  const NcclApi& nccl = *nccl_;
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
  const std::lock_guard<std::mutex> locked(communicators_mutex_);
  for (const auto& communicator : communicators_) {
    std::string error = communicator->async_error();
    if (!error.empty()) return error;
  }
  return "";
}

void NcclWorld::abort_all() {
  // No new call of NCCL's begins any more. One under way ends before the communicators go, unless
  // it waits for a peer: only their going ends it.
  const std::unique_lock<std::mutex> calls = lock_within(mutex_, kCallTime);
  const std::lock_guard<std::mutex> locked(communicators_mutex_);
  if (communicators_.empty()) return;
  std::optional<DeviceGuard> guard;
  try {
    guard.emplace(device_api_, device_);
  } catch (const TransportError&) {  // NOLINT(bugprone-empty-catch): they are to end all the same
  }
  // All in one group: the abort of one may wait for another's kernel.
  const bool is_grouped = nccl_->group_start() == kNcclSuccess;
  for (const auto& communicator : communicators_) communicator->abort();
  if (is_grouped) nccl_->group_end();
}

void NcclWorld::close(double seconds) {
  if (is_closed_.exchange(true)) return;
  const auto deadline =
      Watchdog::Clock::now() +
      std::chrono::duration_cast<Watchdog::Clock::duration>(std::chrono::duration<double>(seconds));
  // To give memory back, and to end a communicator, waits for what is under way, however long; and
  // after a failure for peers that may still be at work.
  if (!watchdog_.drain(deadline) || watchdog_.has_failed()) abort_all();
  const DeviceGuard guard(device_api_, device_);
  {
    const Lock locked(mutex_);
    staging_.clear();
  }
  std::vector<NcclCommunicator*> communicators;
  {
    const std::lock_guard<std::mutex> locked(communicators_mutex_);
    for (const auto& communicator : communicators_) communicators.push_back(communicator.get());
  }
  std::reverse(communicators.begin(), communicators.end());
  for (NcclCommunicator* communicator : communicators) {
    const std::chrono::duration<double> left = deadline - Watchdog::Clock::now();
    communicator->close(std::max(0.0, left.count()));
  }
  watchdog_.stop();
}

}  // namespace gpudist
