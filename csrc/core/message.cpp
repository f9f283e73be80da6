#include "core/message.h"

#include <algorithm>
#include <cstring>

#include "core/errors.h"

namespace gpudist {

size_t fitting_bytes(const std::string& text, size_t room) {
  size_t length = std::min(text.size(), room - 1);
  if (length == text.size()) return length;
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xc0u) == 0x80u) --length;
  return length;
}

void copy_text(char* to, size_t room, const std::string& text) {
  const size_t length = fitting_bytes(text, room);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

namespace {

// An odd number, so that the order of what is folded counts.
constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;

std::string words(uint64_t sequence, int64_t bytes, const std::string& label) {
  return "message " + std::to_string(sequence) + " of " + std::to_string(bytes) + " bytes for '" +
         label + "'";
}

}  // namespace

void Given::fold(const std::vector<int>& peers, uint64_t number, const std::string& what) {
  for (int peer : peers) {
    uint64_t& with_peer = numbers_[peer];
    with_peer = (with_peer ^ number) * kFactor;
  }
  last_ = what;
}

uint64_t Given::with(int peer) const {
  const auto found = numbers_.find(peer);
  return found == numbers_.end() ? 0 : found->second;
}

void write_header(const Transfer& transfer, bool lends, char* slot) {
  WireHeader header{};
  header.sequence = transfer.sequence;
  header.given = transfer.given;
  header.bytes = transfer.bytes;
  header.lender = lends ? &transfer : nullptr;
  std::memcpy(header.digest, transfer.signature->digest.data(), sizeof(header.digest));
  copy_text(header.label, kLabelBytes, transfer.signature->label);
  std::memcpy(slot, &header, sizeof(header));
}

const Transfer* verify_header(const Transfer& transfer, const char* slot, int rank,
                              const std::string& last_given) {
  WireHeader header;
  std::memcpy(&header, slot, sizeof(header));
  header.label[kLabelBytes - 1] = '\0';
  const bool same_operation =
      std::memcmp(header.digest, transfer.signature->digest.data(), sizeof(header.digest)) == 0;
  const bool same_message =
      same_operation && header.sequence == transfer.sequence && header.bytes == transfer.bytes;
  if (same_message && header.given == transfer.given) return header.lender;
  const std::string me = std::to_string(rank), peer = std::to_string(transfer.peer);
  if (same_message) {
    throw PlanMismatch(
        "ranks disagree about what networks were given or did: ranks " + me + " and " + peer +
        ", at the latest in " + last_given + ", found by " +
        words(transfer.sequence, transfer.bytes, transfer.signature->label) +
        "\nnumbers and small CPU tensors given whole, modes, rates and functions must "
        "be equal on every worker; GPUDIST_CHECK=1 names the first that differs");
  }
  throw PlanMismatch(
      std::string("ranks disagree about ") +
      (same_operation ? "the size of a message" : "the operation") + ":\n  rank " + me +
      " expected from rank " + peer + ": " +
      words(transfer.sequence, transfer.bytes, transfer.signature->label) + "\n  rank " + peer +
      " sent to rank " + me + ": " + words(header.sequence, header.bytes, header.label) +
      "\ncall the same operations with the same shapes in the same order on every rank");
}

}  // namespace gpudist
