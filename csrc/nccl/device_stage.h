// A stage of a plan on a GPU: a launch that packs, a group of NCCL calls, and a launch that writes
// the output.
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

// A combine plan with its tables, prepared on first use for each alignment.
class DeviceCombine {
 public:
  // `operations`: those of the world that launches the plan.
  DeviceCombine(std::shared_ptr<Operations> operations, CombinePlan plan)
      : operations_(std::move(operations)), plan_(std::move(plan)) {}
  ~DeviceCombine();
  DeviceCombine(const DeviceCombine&) = delete;

  bool is_empty() const { return plan_.is_empty(); }
  void launch(const std::array<char*, kBuffers>& buffers, const uint32_t* failed,
              DeviceStream stream);

 private:
  // Tables for one alignment. They stay on the host if they are passed with every launch.
  struct Prepared {
    std::vector<char> tables;
    void* memory = nullptr;
    bool is_captured = false;  // a captured graph may read `memory` as long as the graph exists
    CombineArguments arguments;
  };

  CombineArguments prepared(int alignment, DeviceStream stream);
  Prepared prepare(int alignment) const;
  void upload(Prepared& prepared) const;

  const std::shared_ptr<Operations> operations_;
  const CombinePlan plan_;
  std::mutex mutex_;  // stages without messages may run in several threads at once
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

// One NCCL call. `peer` may be a root; both are ranks in the communicator.
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

// A WireCall before addresses are known: offsets in bytes into buffers.
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

  // The stage to run under this capture; 0 means no capture.
  DeviceStage& under(uint64_t capture) {
    return capture != 0 && captured != nullptr ? *captured : *this;
  }

  DeviceCombine before;
  DeviceCombine after;
  std::vector<WireStep> steps;
  // Bytes packed to send, and bytes received and unpacked.
  int64_t sent_bytes;
  int64_t received_bytes;
  // Variant for graph capture, in which all messages start and end in staging memory. During
  // capture NCCL registers tensors automatically, but only those of one kind of memory, and both
  // sides of a message must be registered alike. Null if this stage uses staging memory for all
  // messages anyway.
  DeviceStage* const captured;
};

struct DeviceCall {
  DeviceStage* stage;
  char* input;
  char* output;
};

}  // namespace gpudist
