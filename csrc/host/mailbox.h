// What ranks share: a control block each, and a mailbox for each pair that talks.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/message.h"
#include "host/host_communicator.h"

namespace gpudist {

constexpr int kSlots = 8;
constexpr int64_t kSlotBytes = 32 * 1024;

struct alignas(64) Slot {
  char data[kSlotBytes];
};

// A single-producer, single-consumer ring. `bytes` of a slot are written before `written` counts
// it.
struct Mailbox {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> consumed;
  // Loans that the receiver has read, and whether it can read any.
  std::atomic<uint64_t> pulled;
  std::atomic<uint32_t> can_pull;
  // The sender has taken its loans back, before their memory became something else.
  alignas(64) std::atomic<uint32_t> revoked;
  Slot slots[kSlots];
};

struct Control {
  alignas(64) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint32_t> closed;
  // Its own address in this rank's memory, for others to try whether they can read there.
  std::atomic<uint64_t> self;
  // The world's failure; only rank 0's is used. 0 none, 1 being written, 2 readable.
  std::atomic<uint32_t> failure_state;
  char failure[HostCommunicator::kFailureBytes];
  // What this rank does; a torn read in a report is harmless.
  std::atomic<uint64_t> operations;
  std::atomic<uint64_t> label[kLabelBytes / 8];
  // Descriptor + 1, in the receiver's process, of the mailbox that this rank sends to; by receiver.
  std::atomic<int32_t> outboxes[];

  static size_t bytes(int size) { return sizeof(Control) + size * sizeof(std::atomic<int32_t>); }
};

}  // namespace gpudist
