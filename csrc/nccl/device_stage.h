// A stage of a plan on a GPU: a launch that packs, a group of NCCL's calls, a launch that makes the
// output.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/combine_plan.h"
#include "device/device_api.h"
#include "nccl/nccl_communicator.h"
#include "nccl/operations.h"

namespace gpudist {

// A combine plan, and its tables where the device can read them.
class DeviceCombine {
 public:
  // `operations`: of the world that launches it.
  DeviceCombine(std::shared_ptr<Operations> operations, CombinePlan plan)
      : operations_(std::move(operations)), plan_(std::move(plan)) {}
  ~DeviceCombine();
  DeviceCombine(const DeviceCombine&) = delete;

  bool is_empty() const { return plan_.is_empty(); }
  // `failed`: see CombineArguments.
  void launch(const std::array<char*, kBuffers>& buffers, const uint32_t* failed,
              DeviceStream stream);

 private:
  // Tables of one alignment, on the host if they travel with every launch.
  struct Prepared {
    std::vector<char> tables;
    void* memory = nullptr;
    bool is_captured = false;  // a graph may read the memory as long as it lives
    CombineArguments arguments;
  };

  CombineArguments prepared(int alignment, DeviceStream stream);
  Prepared prepare(int alignment) const;
  void upload(Prepared& prepared) const;

  const std::shared_ptr<Operations> operations_;
  const CombinePlan plan_;
  std::mutex mutex_;  // stages that exchange nothing may be run from several threads
  std::map<int, Prepared> prepared_;
};

enum class WireKind : int {
  kSend,
  kReceive,
  kBroadcast,
  kReduce,
  kAllReduce,
  kAllGather,
  kReduceScatter,
};

// A call of NCCL's. `peer` is the root, where there is one; both by rank in the communicator.
struct WireCall {
  WireKind kind;
  NcclCommunicator* communicator;
  int peer;
  const void* from;
  void* to;
  size_t count;
  int dtype;
  int op;
};

// The same before addresses are known: bytes into buffers.
struct WireStep {
  WireKind kind;
  NcclCommunicator* communicator;
  int peer;
  Buffer from;
  int64_t from_offset;
  Buffer to;
  int64_t to_offset;
  size_t count;
  int dtype;
  int op;

  WireCall at(const std::array<char*, kBuffers>& buffers) const;
};

struct DeviceStage {
  DeviceStage(const std::shared_ptr<Operations>& operations, CombinePlan before, CombinePlan after,
              std::vector<WireStep> steps, int64_t sent_bytes, int64_t received_bytes,
              DeviceStage* captured)
      : before(operations, std::move(before)),
        after(operations, std::move(after)),
        steps(std::move(steps)),
        sent_bytes(sent_bytes),
        received_bytes(received_bytes),
        captured(captured) {}

  // What is put on a stream for it.
  DeviceStage& under(uint64_t capture) {
    return capture != 0 && captured != nullptr ? *captured : *this;
  }

  DeviceCombine before;
  DeviceCombine after;
  std::vector<WireStep> steps;
  // Of what is packed, and of what arrives and is unpacked.
  int64_t sent_bytes;
  int64_t received_bytes;
  // The same where a graph is captured: all messages start from staging memory and arrive there.
  // NCCL registers by itself the tensors of a graph whose memory is of one kind, and not those of
  // another; both sides of a message have to be alike. Null if this one does so anyway.
  DeviceStage* const captured;
};

struct DeviceCall {
  DeviceStage* stage;
  char* input;
  char* output;
};

}  // namespace gpudist
