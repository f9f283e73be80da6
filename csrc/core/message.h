// Header of every message; it reveals when ranks disagree about an operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/transfer.h"

namespace gpudist {

constexpr int kLabelBytes = 200;

// What the networks of this rank were given and did, as one number for each peer that must have the
// same; every message to the peer compares it.
class Given {
 public:
  // Fold a number into those of the peers, which do the same; `what` names it.
  void fold(const std::vector<int>& peers, uint64_t number, const std::string& what);
  uint64_t with(int peer) const;
  const std::string& last() const { return last_; }

 private:
  std::map<int, uint64_t> numbers_;
  std::string last_ = "no call of this rank";
};

// Header in front of the payload. If the payload fills a slot, the header has a slot of its own.
struct WireHeader {
  uint64_t sequence;
  uint64_t given;
  int64_t bytes;
  // Where ranks are threads: the send, if the receiver is to read its cells; no payload follows.
  const Transfer* lender;
  char digest[16];
  char label[kLabelBytes];
};

// Size of the header in a slot, rounded up so that the payload is aligned.
constexpr int64_t kHeaderBytes = (sizeof(WireHeader) + 63) / 64 * 64;

void write_header(const Transfer& transfer, bool lends, char* slot);

// Compare the header in `slot` with what `rank` expects and return its `lender`, which is garbage
// if another process wrote it. Throws PlanMismatch with both ranks' views; `last_given` names what
// was folded last.
const Transfer* verify_header(const Transfer& transfer, const char* slot, int rank,
                              const std::string& last_given = "");

// Copy as much of `text` as fits with a terminating zero, without cutting a UTF-8 character.
size_t fitting_bytes(const std::string& text, size_t room);
void copy_text(char* to, size_t room, const std::string& text);

}  // namespace gpudist
