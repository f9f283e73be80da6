// A test double of NCCL: its C symbols as of version 2.27, for ranks that are processes or threads
// on one machine and use host memory. Nothing it does is a result of NCCL.
//
// The double detects misuses that NCCL would ignore or answer with a hang. If a call can detect the
// misuse, it is refused. If only the peers can, the communicator gets an error on all its ranks; on
// the null stream ncclGroupEnd returns that error too.
#include <cstring>

#include "device_double.h"
#include "graph_double.h"
#include "hooks.h"
#include "memory_double.h"
#include "nccl_calls.h"
#include "nccl_checks.h"
#include "nccl_group.h"
#include "nccl_reduce.h"
#include "stream_double.h"

namespace gpudist::doubles {

namespace {

std::string peer_text(int peer) {
  return peer < 0 ? "-" : std::to_string(peer);
}

void log_operation(const Communicator& communicator, const Operation& operation) {
  std::string line = communicator.name + " " + std::to_string(communicator.rank) + " " +
                     kind_name(operation.kind) + " " + std::to_string(operation.count) + " " +
                     dtype_name(operation.dtype) + " " + peer_text(operation.peer) + " " +
                     std::to_string(stream_number(operation.stream)) + " " +
                     std::to_string(this_group().depth());
  if (operation.op >= 0) line += std::string(" ") + op_name(operation.op);
  log_call(line);
}

bool is_registered(Communicator& communicator, const Operation& operation) {
  const bool is_captured = graph_of(operation.stream) != nullptr;
  const auto has = [&](const void* memory, size_t bytes) {
    return bytes == 0 || communicator.registrations.has(memory, bytes, is_captured);
  };
  // A rank's message to itself is a copy.
  return (!is_message(operation.kind) || operation.peer != communicator.rank) &&
         has(operation.from, operation.read_bytes(communicator.rank, communicator.size)) &&
         has(operation.to, operation.written_bytes(communicator.rank, communicator.size));
}

int try_operation(NcclComm comm, Operation operation) {
  const char* call = kind_name(operation.kind);
  Communicator* communicator = nullptr;
  if (const int refused = check_usable(call, comm, &communicator)) return refused;
  if (const int refused = enter(call, *communicator)) return refused;
  if (const int refused = check_operation(*communicator, operation)) {
    communicator->leave();
    return refused;
  }
  operation.fault = next_fault(communicator->root_rank);
  operation.is_registered = is_registered(*communicator, operation);
  log_operation(*communicator, operation);
  this_group().add(*communicator, operation);
  return kNcclSuccess;
}

// Outside a group, an operation forms its own group.
int call_operation(NcclComm comm, const Operation& operation) {
  if (next_call_fails()) return fail_call(kind_name(operation.kind));
  Group& group = this_group();
  const bool is_alone = group.depth() == 0;
  const int result = try_operation(comm, operation);
  if (result != kNcclSuccess) {
    group.fail(result);
    return result;
  }
  if (!is_alone) return kNcclSuccess;
  group.start();
  return group.end();
}

}  // namespace

}  // namespace gpudist::doubles

using namespace gpudist;
using namespace gpudist::doubles;

GPUDIST_EXPORT int ncclGetVersion(int* version) {
  *version = static_cast<int>(setting("version"));
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclGetUniqueId(NcclUniqueId* id) {
  if (next_call_fails()) return fail_call("get_unique_id");
  Address address{};
  if (!Wire::make(&address)) return kSystemError;
  memset(id, 0, sizeof(*id));
  memcpy(id->internal, &address, sizeof(address));
  return kNcclSuccess;
}

GPUDIST_EXPORT const char* ncclGetErrorString(int result) {
  switch (result) {
    case kNcclSuccess: return "no error";
    case kCudaError: return "unhandled cuda error (of the double)";
    case kSystemError: return "unhandled system error (of the double)";
    case kInvalidArgument: return "invalid argument (of the double)";
    case kNcclInvalidUsage: return "invalid usage (of the double)";
    case kRemoteError: return "remote process exited or there was a network error (of the double)";
    case kNcclInProgress: return "NCCL operation in progress (of the double)";
    default: return "internal error (of the double)";
  }
}

// The communicator's error if it has one, otherwise that of the last failed call of any thread.
GPUDIST_EXPORT const char* ncclGetLastError(NcclComm comm) {
  static thread_local std::string text;
  Communicator* communicator = find_communicator(comm);
  if (communicator == nullptr || communicator->error(&text) == 0) text = last_error();
  return text.c_str();
}

GPUDIST_EXPORT int ncclCommInitRankConfig(NcclComm* comm, int size, NcclUniqueId id, int rank,
                                          NcclConfig* config) {
  if (next_call_fails()) return fail_call("init");
  log_call("- " + std::to_string(rank) + " init " + std::to_string(size) + " - - - " +
           std::to_string(this_group().depth()));
  *comm = nullptr;
  if (const int refused = check_config("init", config)) return refused;
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) {
    return refuse(kInvalidArgument,
                  "init: rank " + std::to_string(rank) + " of " + std::to_string(size));
  }
  if (this_group().depth() > 0) {
    return refuse(kNcclInvalidUsage, "init: in a group, for which there is no double");
  }
  if (next_init_stalls(rank)) {
    stall_until_cleared(clears());
    return kSystemError;
  }
  need_context("init");
  Address address;
  memcpy(&address, id.internal, sizeof(address));
  Communicator* made = nullptr;
  const int result = join_communicator(address, size, rank, &made);
  *comm = made;
  return result;
}

GPUDIST_EXPORT int ncclCommSplit(NcclComm comm, int color, int key, NcclComm* part,
                                 NcclConfig* config) {
  if (next_call_fails()) return fail_call("split");
  *part = nullptr;
  Communicator* parent = nullptr;
  if (const int refused = check_config("split", config)) return refused;
  if (const int refused = check_usable("split", comm, &parent)) return refused;
  if (color < 0 && color != kNcclSplitNoColor) return refuse(kInvalidArgument, "split: no color");
  if (this_group().depth() > 0) {
    return refuse(kNcclInvalidUsage, "split: in a group, for which there is no double");
  }
  if (const int refused = enter("split", *parent)) return refused;
  log_plain("split", parent);
  if (parent->has_work()) {
    parent->leave();
    return refuse(kNcclInvalidUsage, "split: operations of the parent are still in flight");
  }
  Communicator* made = nullptr;
  const int result = split_communicator(*parent, color, key, &made);
  parent->leave();
  *part = made;
  return result;
}

GPUDIST_EXPORT int ncclCommGetAsyncError(NcclComm comm, int* error) {
  Communicator* communicator = find_communicator(comm);
  if (communicator == nullptr || communicator->state == Communicator::State::kDestroyed ||
      communicator->state == Communicator::State::kAborted) {
    return refuse(kInvalidArgument, "get_async_error: no such communicator any more");
  }
  std::string text;
  *error = communicator->error(&text);
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclCommCount(NcclComm comm, int* size) {
  Communicator* communicator = nullptr;
  if (const int refused = check_usable("count", comm, &communicator)) return refused;
  *size = communicator->size;
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclCommUserRank(NcclComm comm, int* rank) {
  Communicator* communicator = nullptr;
  if (const int refused = check_usable("user_rank", comm, &communicator)) return refused;
  *rank = communicator->rank;
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclGroupStart() {
  if (next_call_fails()) return fail_call("group_start");
  this_group().start();
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclGroupEnd() {
  if (next_call_fails()) fail_call("group_end");
  return this_group().end();
}

GPUDIST_EXPORT int ncclSend(const void* from, size_t count, int dtype, int peer, NcclComm comm,
                            DeviceStream stream) {
  return call_operation(comm, {Kind::kSend, from, nullptr, count, dtype, -1, peer, stream});
}

GPUDIST_EXPORT int ncclRecv(void* to, size_t count, int dtype, int peer, NcclComm comm,
                            DeviceStream stream) {
  return call_operation(comm, {Kind::kRecv, nullptr, to, count, dtype, -1, peer, stream});
}

GPUDIST_EXPORT int ncclBroadcast(const void* from, void* to, size_t count, int dtype, int root,
                                 NcclComm comm, DeviceStream stream) {
  return call_operation(comm, {Kind::kBroadcast, from, to, count, dtype, -1, root, stream});
}

GPUDIST_EXPORT int ncclReduce(const void* from, void* to, size_t count, int dtype, int op, int root,
                              NcclComm comm, DeviceStream stream) {
  return call_operation(comm, {Kind::kReduce, from, to, count, dtype, op, root, stream});
}

GPUDIST_EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int dtype, int op,
                                 NcclComm comm, DeviceStream stream) {
  return call_operation(comm, {Kind::kAllReduce, from, to, count, dtype, op, -1, stream});
}

GPUDIST_EXPORT int ncclReduceScatter(const void* from, void* to, size_t received, int dtype, int op,
                                     NcclComm comm, DeviceStream stream) {
  return call_operation(comm, {Kind::kReduceScatter, from, to, received, dtype, op, -1, stream});
}

GPUDIST_EXPORT int ncclAllGather(const void* from, void* to, size_t sent, int dtype, NcclComm comm,
                                 DeviceStream stream) {
  return call_operation(comm, {Kind::kAllGather, from, to, sent, dtype, -1, -1, stream});
}

GPUDIST_EXPORT int ncclMemAlloc(void** memory, size_t bytes) {
  if (next_call_fails()) return fail_call("mem_alloc");
  if (device_call_fails("mem_alloc")) return kCudaError;
  need_context("ncclMemAlloc");
  *memory = take_memory(MemoryKind::kMapped, current_device(), bytes);
  if (*memory == nullptr) return bytes == 0 ? kNcclSuccess : kCudaError;
  count_call("mem_alloc");
  return kNcclSuccess;
}

// Unlike cudaFree, does not wait for work on the device.
GPUDIST_EXPORT int ncclMemFree(void* memory) {
  if (next_call_fails()) return fail_call("mem_free");
  need_context("ncclMemFree");
  if (memory == nullptr) return kNcclSuccess;
  if (device_of(MemoryKind::kMapped, memory) < 0) {
    return refuse(kInvalidArgument, "mem_free: memory that mem_alloc has not given");
  }
  count_call("mem_free");
  end_memory(memory, "ncclMemFree");
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclCommRegister(NcclComm comm, void* memory, size_t bytes, void** handle) {
  if (next_call_fails()) return fail_call("register");
  Communicator* communicator = nullptr;
  if (const int refused = check_usable("register", comm, &communicator)) return refused;
  if (memory == nullptr || bytes == 0) return refuse(kInvalidArgument, "register: no memory");
  log_plain("register", communicator);
  *handle = communicator->registrations.add(memory, bytes);
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclCommDeregister(NcclComm comm, void* handle) {
  if (next_call_fails()) return fail_call("deregister");
  Communicator* communicator = nullptr;
  if (const int refused = check_usable("deregister", comm, &communicator)) return refused;
  log_plain("deregister", communicator);
  if (communicator->registrations.remove(handle)) return kNcclSuccess;
  return refuse(kInvalidArgument, "deregister: no such handle");
}
