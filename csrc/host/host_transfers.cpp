// Progress of transfers: filling and emptying slots of mailboxes, and reading a thread's cells.
#include <algorithm>

#include "core/errors.h"
#include "core/message.h"
#include "host/host_communicator.h"
#include "host/mailbox.h"

namespace gpudist {

namespace {

// Number of bytes by which successive sums of the same cells advance, so that the cells stay in the
// cache.
constexpr int64_t kStreamedBytes = 256 * 1024;
// Maximum bytes to read before other transfers make progress.
constexpr int64_t kTurnBytes = 1024 * 1024;

std::string no_shared_slot(const Transfer& receive) {
  return "rank " + std::to_string(receive.peer) + " refers to memory that it does not have in '" +
         receive.signature->label + "'; run the same gpudist on every rank";
}

bool has_revoked(const Mailbox* mailbox) {
  return mailbox->revoked.load(std::memory_order_seq_cst) != 0;
}

}  // namespace

void HostCommunicator::post(Transfer* transfer) {
  const auto locked = enter();
  require_open();
  transfer->stream = BoxStream(transfer->boxes);
  if (transfer->kind == Transfer::Kind::kOwn) {
    transfer->source_stream = BoxStream(transfer->source_boxes);
    own_.push_back(transfer);
    return;
  }
  if (transfer->own != nullptr) transfer->own_stream = BoxStream(transfer->source_boxes);
  const bool sends = transfer->kind == Transfer::Kind::kSend;
  const int peer = transfer->peer;
  if (peer < 0 || peer >= size_ || peer == rank_) {
    throw TransportError("rank " + std::to_string(rank_) + " has no mailbox for rank " +
                         std::to_string(peer));
  }
  if (!sends) incoming(peer);
  transfer->sequence = (sends ? sent_ : received_)[peer]++;
  transfer->given = given_.with(peer);
  auto& queue = (sends ? sends_ : receives_)[peer];
  auto& busy = sends ? busy_sends_ : busy_receives_;
  if (queue.empty() && (!sends || lent_[peer].empty())) busy.push_back(peer);
  queue.push_back(transfer);
}

bool HostCommunicator::progress() {
  bool moved = false;
  for (size_t i = 0; i < busy_sends_.size();) {
    const int peer = busy_sends_[i];
    moved |= progress_send(peer);
    if (sends_[peer].empty() && lent_[peer].empty()) {
      busy_sends_.erase(busy_sends_.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
  for (size_t i = 0; i < busy_receives_.size();) {
    const int peer = busy_receives_[i];
    moved |= progress_receive(peer);
    if (receives_[peer].empty()) {
      busy_receives_.erase(busy_receives_.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
  return progress_own() || moved;
}

bool HostCommunicator::progress_send(int peer) {
  Mailbox* mailbox = outgoing(peer);
  if (mailbox == nullptr) return false;
  bool moved = progress_loans(peer, mailbox);
  auto& queue = sends_[peer];
  uint64_t written = mailbox->written.load(std::memory_order_relaxed);
  while (!queue.empty()) {
    Transfer& transfer = *queue.front();
    if (transfer.limit() < transfer.bytes) break;
    if (written - mailbox->consumed.load(std::memory_order_seq_cst) == kSlots) break;
    char* slot = mailbox->slots[written % kSlots].data;
    int64_t room = kSlotBytes;
    int shared_slot = -1;
    const bool first = !transfer.header_done;
    // What does not fit into a slot would make threads take turns for every few slots.
    const bool lends = first && is_thread_ && transfer.bytes > kSlotBytes - kHeaderBytes;
    if (first) {
      write_header(transfer, lends, slot);
      transfer.header_done = true;
      slot += kHeaderBytes;
      room -= kHeaderBytes;
    } else if (transfer.shared != nullptr && !share_piece(transfer, &shared_slot)) {
      break;
    }
    const int64_t bytes = lends ? 0 : std::min(room, transfer.bytes - transfer.moved);
    if (shared_slot < 0) {
      transfer.stream.gather(transfer.tensor, slot, bytes);
    } else {
      transfer.stream.walk(bytes, [](int64_t, size_t) {});
      readers_[shared_slot].told.emplace_back(mailbox, written);
      --readers_[shared_slot].untold;
    }
    transfer.moved += bytes;
    mailbox->shared[written % kSlots] = static_cast<uint32_t>(shared_slot + 1);
    mailbox->written.store(++written, std::memory_order_seq_cst);
    ring(peer);
    moved = true;
    if (lends) {
      transfer.lent = ++loans_[peer];
      lent_[peer].push_back(&transfer);
      queue.pop_front();
    } else if (transfer.moved == transfer.bytes) {
      transfer.complete = true;
      queue.pop_front();
    }
  }
  return moved;
}

bool HostCommunicator::Readers::are_done() const {
  return untold == 0 && std::all_of(told.begin(), told.end(), [](const auto& reader) {
           return reader.first->consumed.load(std::memory_order_seq_cst) > reader.second;
         });
}

// Pack the next piece into a shared slot, unless another send has; -1 if none is free. Returns
// false if the slots have earlier pieces of the same sends, whose receivers are on their way. To
// wait for other sends might be to wait for each other.
bool HostCommunicator::share_piece(const Transfer& transfer, int* slot) {
  SharedPacking& packing = *transfer.shared;
  const int64_t first = kSlotBytes - kHeaderBytes;
  const auto piece = static_cast<size_t>((transfer.moved - first) / kSlotBytes);
  if (piece == packing.slot_of.size()) {
    Readers& next = readers_[next_shared_];
    const bool is_free = next.are_done();
    if (!is_free && next.packing == &packing) return false;
    packing.slot_of.push_back(is_free ? next_shared_ : -1);
    if (is_free) {
      next.packing = &packing;
      next.untold = packing.receivers;
      next.told.clear();
      BoxStream stream = transfer.stream;
      stream.gather(transfer.tensor, control(rank_)->shared[next_shared_].data,
                    std::min(kSlotBytes, transfer.bytes - transfer.moved));
      next_shared_ = (next_shared_ + 1) % kSlots;
    }
  }
  *slot = packing.slot_of[piece];
  return true;
}

bool HostCommunicator::progress_loans(int peer, Mailbox* mailbox) {
  auto& lent = lent_[peer];
  bool moved = false;
  while (!lent.empty() && lent.front()->lent <= mailbox->returned.load(std::memory_order_seq_cst)) {
    lent.front()->complete = true;
    lent.pop_front();
    moved = true;
  }
  return moved;
}

bool HostCommunicator::progress_receive(int peer) {
  Mailbox* mailbox = incoming(peer);
  auto& queue = receives_[peer];
  bool moved = false;
  while (!queue.empty()) {
    Transfer& transfer = *queue.front();
    if (!(transfer.lender != nullptr ? receive_lent(mailbox, transfer)
                                     : receive_slot(mailbox, transfer)))
      break;
    moved = true;
    if (transfer.complete) queue.pop_front();
  }
  return moved;
}

// Empty one slot if it is full and the transfer may proceed.
bool HostCommunicator::receive_slot(Mailbox* mailbox, Transfer& transfer) {
  const uint64_t consumed = mailbox->consumed.load(std::memory_order_relaxed);
  if (mailbox->written.load(std::memory_order_seq_cst) == consumed) return false;
  const char* slot = mailbox->slots[consumed % kSlots].data;
  const uint32_t shared = mailbox->shared[consumed % kSlots];
  if (shared > kSlots) throw TransportError(no_shared_slot(transfer));
  int64_t room = kSlotBytes;
  if (!transfer.header_done) {
    const Transfer* lender = verify_header(transfer, slot, rank_, given_.last());
    const bool lends = is_thread_ && lender != nullptr;
    if (lends && has_revoked(mailbox)) return false;
    transfer.header_done = true;
    if (lends) {
      transfer.lender = lender;
      transfer.source_stream = BoxStream(lender->boxes);
    }
  }
  if (shared > 0) slot = control(transfer.peer)->shared[shared - 1].data;
  if (transfer.moved == 0) {
    slot += kHeaderBytes;
    room -= kHeaderBytes;
  }
  if (transfer.lender == nullptr) {
    const int64_t bytes = std::min(room, transfer.bytes - transfer.moved);
    if (transfer.limit() < transfer.moved + bytes) return false;
    transfer.unpack(slot, bytes);
    transfer.moved += bytes;
    transfer.complete = transfer.moved == transfer.bytes;
  }
  mailbox->consumed.store(consumed + 1, std::memory_order_seq_cst);
  ring(transfer.peer);
  return true;
}

// Read up to kTurnBytes where the sender has them.
bool HostCommunicator::receive_lent(Mailbox* mailbox, Transfer& transfer) {
  const int64_t turn = transfer.streams ? kStreamedBytes : kTurnBytes;
  const int64_t bytes = std::min(turn, transfer.limit() - transfer.moved);
  if (bytes <= 0 || has_revoked(mailbox)) return false;
  transfer.source_stream.walk(bytes, [&](int64_t offset, size_t piece) {
    transfer.unpack(transfer.lender->tensor + offset, static_cast<int64_t>(piece));
  });
  // What was read before the sender took it back may be invalid; the failure will be reported.
  if (has_revoked(mailbox)) return false;
  transfer.moved += bytes;
  if (transfer.moved < transfer.bytes) return true;
  transfer.complete = true;
  mailbox->returned.fetch_add(1, std::memory_order_seq_cst);
  ring(transfer.peer);
  return true;
}

bool HostCommunicator::progress_own() {
  bool moved = false;
  for (size_t i = 0; i < own_.size();) {
    Transfer& own = *own_[i];
    const int64_t turn = own.streams ? kStreamedBytes : own.bytes;
    const int64_t bytes = std::min(turn, own.limit() - own.moved);
    if (bytes > 0) {
      if (own.adds) {
        add_cells(own.source, own.source_stream, own.tensor, own.stream, bytes, own.dtype);
      } else {
        copy_cells(own.source, own.source_stream, own.tensor, own.stream, bytes, false);
      }
      own.moved += bytes;
      moved = true;
    }
    own.complete = own.moved == own.bytes;
    if (own.complete) {
      moved = true;
      own_.erase(own_.begin() + static_cast<long>(i));
    } else {
      ++i;
    }
  }
  return moved;
}

}  // namespace gpudist
