// The header in front of every message, by which a disagreement between ranks is found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/transfer.h"

namespace gpudist {

constexpr int kLabelBytes = 200;

// What travels in front of a message, in a slot of its own if the payload leaves no room.
struct WireHeader {
  uint64_t sequence;
  int64_t bytes;
  uint64_t lends;  // whether what follows says where the payload is, instead of being it
  char digest[16];
  char label[kLabelBytes];
};

// Bytes of a slot it takes, so that the payload is aligned.
constexpr int64_t kHeaderBytes = (sizeof(WireHeader) + 63) / 64 * 64;

void write_header(const Transfer& transfer, bool lends, char* slot);

// Whether the message is lent. Throw PlanMismatch, with both views, unless the header in `slot` is
// what `rank` expects.
bool verify_header(const Transfer& transfer, const char* slot, int rank);

// Copy what fits beside a final zero, without cutting a UTF-8 character.
size_t fitting_bytes(const std::string& text, size_t room);
void copy_text(char* to, size_t room, const std::string& text);

}  // namespace gpudist
