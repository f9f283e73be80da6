// A test double of NCCL: its C symbols, as of 2.27, for ranks that are processes or threads of one
// machine and memory of the host. Nothing it does is a result of NCCL.
//
// A misuse that NCCL would leave unnoticed, or answer with a hang, is refused where a call can
// tell, and set as the error of a communicator on all its ranks where only the peers can. On the
// null stream ncclGroupEnd returns that error too.
#include <cstring>
#include <map>
#include <mutex>

#include "hooks.h"
#include "nccl_checks.h"
#include "nccl_group.h"
#include "nccl_reduce.h"
#include "stream_double.h"

extern "C" const gpudist::DeviceApi* gpudist_device_api();

namespace gpudist::doubles {

namespace {

struct Memory {
  std::mutex mutex;
  std::map<void*, size_t> bytes;
};

Memory& memory_of_nccl() {
  static Memory& memory = *new Memory;
  return memory;
}

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

// Of the calls that are no operations.
void log_plain(const char* call, const Communicator* communicator) {
  log_call((communicator == nullptr
                ? std::string("- -")
                : communicator->name + " " + std::to_string(communicator->rank)) +
           " " + call + " - - - - " + std::to_string(this_group().depth()));
}

int fail_call(const char* call) {
  set_last_error(std::string(call) + ": injected failure");
  this_group().fail(kSystemError);
  return kSystemError;
}

int enter(const char* call, Communicator& communicator) {
  if (communicator.enter()) return kNcclSuccess;
  return refuse(kNcclInvalidUsage,
                std::string(call) + ": another thread is using " + communicator.name);
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
  log_operation(*communicator, operation);
  this_group().add(*communicator, operation);
  return kNcclSuccess;
}

// Without a group, an operation is a group of one.
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

// The end of a communicator without an abort, or its beginning.
int end_communicator(const char* call, NcclComm comm, Communicator::State ended) {
  if (next_call_fails()) return fail_call(call);
  Communicator* communicator = find_communicator(comm);
  const bool was_finalized = communicator != nullptr && ended == Communicator::State::kDestroyed &&
                             communicator->state == Communicator::State::kFinalized;
  if (!was_finalized) {
    if (const int refused = check_usable(call, comm, &communicator)) return refused;
  }
  if (const int refused = enter(call, *communicator)) return refused;
  log_plain(call, communicator);
  int result = kNcclSuccess;
  if (this_group().uses(*communicator)) {
    result = refuse(kNcclInvalidUsage, std::string(call) + ": a group with its operations is open");
  } else if (ended == Communicator::State::kDestroyed && communicator->has_work()) {
    result = refuse(kNcclInvalidUsage, std::string(call) + ": operations are still in flight");
  } else {
    communicator->drain();
    if (!communicator->end(ended)) {
      result = refuse(kNcclInvalidUsage, std::string(call) + ": another thread has ended it");
    }
  }
  communicator->leave();
  return result;
}

}  // namespace

}  // namespace gpudist::doubles

using namespace gpudist;
using namespace gpudist::doubles;

GPUDIST_EXPORT int ncclGetVersion(int* version) {
  *version = nccl_version();
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
    case 1: return "unhandled cuda error (of the double)";
    case kSystemError: return "unhandled system error (of the double)";
    case kInvalidArgument: return "invalid argument (of the double)";
    case kNcclInvalidUsage: return "invalid usage (of the double)";
    case kRemoteError: return "remote process exited or there was a network error (of the double)";
    case kNcclInProgress: return "NCCL operation in progress (of the double)";
    default: return "internal error (of the double)";
  }
}

// Of the communicator, if it has an error, else of the last call of any thread that failed.
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
    stall_until_cleared();
    return kSystemError;
  }
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
  Communicator* made = nullptr;
  const int result = split_communicator(*parent, color, key, &made);
  parent->leave();
  *part = made;
  return result;
}

GPUDIST_EXPORT int ncclCommFinalize(NcclComm comm) {
  return end_communicator("finalize", comm, Communicator::State::kFinalized);
}

GPUDIST_EXPORT int ncclCommDestroy(NcclComm comm) {
  return end_communicator("destroy", comm, Communicator::State::kDestroyed);
}

// From any thread, also while another uses the communicator.
GPUDIST_EXPORT int ncclCommAbort(NcclComm comm) {
  Communicator* communicator = find_communicator(comm);
  if (communicator == nullptr) return refuse(kInvalidArgument, "abort: no such communicator");
  log_plain("abort", communicator);
  if (communicator->end(Communicator::State::kAborted)) return kNcclSuccess;
  return refuse(kNcclInvalidUsage, "abort: the communicator has ended already");
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
  if (gpudist_device_api()->allocate(memory, bytes) != 0) return 1;
  const std::lock_guard<std::mutex> locked(memory_of_nccl().mutex);
  memory_of_nccl().bytes[*memory] = bytes;
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclMemFree(void* memory) {
  if (next_call_fails()) return fail_call("mem_free");
  {
    const std::lock_guard<std::mutex> locked(memory_of_nccl().mutex);
    if (memory != nullptr && memory_of_nccl().bytes.erase(memory) == 0) {
      return refuse(kInvalidArgument, "mem_free: memory that mem_alloc has not given");
    }
  }
  return gpudist_device_api()->release(memory) == 0 ? kNcclSuccess : 1;
}

GPUDIST_EXPORT int ncclCommRegister(NcclComm comm, void* memory, size_t bytes, void** handle) {
  if (next_call_fails()) return fail_call("register");
  Communicator* communicator = nullptr;
  if (const int refused = check_usable("register", comm, &communicator)) return refused;
  if (memory == nullptr || bytes == 0) return refuse(kInvalidArgument, "register: no memory");
  log_plain("register", communicator);
  const std::lock_guard<std::mutex> locked(communicator->registered_mutex);
  *handle = new char;
  communicator->registered.insert(*handle);
  return kNcclSuccess;
}

GPUDIST_EXPORT int ncclCommDeregister(NcclComm comm, void* handle) {
  if (next_call_fails()) return fail_call("deregister");
  Communicator* communicator = nullptr;
  if (const int refused = check_usable("deregister", comm, &communicator)) return refused;
  log_plain("deregister", communicator);
  const std::lock_guard<std::mutex> locked(communicator->registered_mutex);
  if (communicator->registered.erase(handle) == 0) {
    return refuse(kInvalidArgument, "deregister: no such handle");
  }
  delete static_cast<char*>(handle);
  return kNcclSuccess;
}
