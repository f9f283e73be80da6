// Shared memory of the ranks: a control block each, and a mailbox for each communicating pair.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/message.h"
#include "host/host_communicator.h"

namespace gpudist {

constexpr int kSlots = 4;
constexpr int64_t kSlotBytes = 64 * 1024;

struct alignas(64) MailboxSlot {
  char data[kSlotBytes];
};

// Single-producer, single-consumer ring. The sender writes a slot before it increments `written`.
struct Mailbox {
  // Written by the sender.
  alignas(64) std::atomic<uint64_t> written;
  // For each slot: 0, or 1 + the number of the sender's shared slot that has the payload.
  uint32_t shared[kSlots];
  // Where ranks are threads: whether the sender has withdrawn what it lent, because its memory is
  // about to be reused.
  std::atomic<uint32_t> revoked;
  // Written by the receiver.
  alignas(64) std::atomic<uint64_t> consumed;
  // Number of lent messages that it has read.
  std::atomic<uint64_t> returned;
  MailboxSlot slots[kSlots];
};

struct Control {
  alignas(64) std::atomic<uint32_t> doorbell;
  std::atomic<uint32_t> sleeping;
  alignas(64) std::atomic<uint32_t> closed;
  // Failure of the world; only rank 0's is used. 0: none, 1: being written, 2: readable.
  std::atomic<uint32_t> failure_state;
  char failure[HostCommunicator::kFailureBytes];
  // Current operation of this rank, for reports. Torn reads are harmless.
  std::atomic<uint64_t> operations;
  std::atomic<uint64_t> label[kLabelBytes / 8];
  // Pieces of messages that this rank sends to several others. A slot is reused once all of them
  // have read it.
  MailboxSlot shared[kSlots];
  // For each receiver: 1 + the id, in the receiver's process, of the mailbox that this rank writes
  // to.
  std::atomic<int64_t> outboxes[];

  static size_t bytes(int size) { return sizeof(Control) + size * sizeof(std::atomic<int64_t>); }
};

}  // namespace gpudist
