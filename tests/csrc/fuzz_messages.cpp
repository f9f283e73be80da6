// Parsing of memory that another process writes: headers of messages. Used by libFuzzer and by the
// random headers in test_hostile.cpp.
#include <algorithm>
#include <cstring>

#include "core/errors.h"
#include "core/message.h"

namespace {

using namespace gpudist;

const Signature kSignature{"fuzz", "0123456789abcdef"};

void require(bool fine) {
  if (!fine) __builtin_trap();
}

}  // namespace

// The first byte selects what is damaged: the right header, at places of two bytes with a value of
// two bytes each, or else a header of the other bytes.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  Transfer transfer;
  transfer.peer = 1;
  transfer.bytes = 64 * 1024;
  transfer.signature = &kSignature;
  transfer.sequence = 7;
  char right[kHeaderBytes] = {}, slot[kHeaderBytes] = {};
  write_header(transfer, false, right);
  if (data[0] == 1) {
    std::memcpy(slot, right, sizeof(slot));
    for (size_t i = 1; i + 4 <= size; i += 4) {
      const size_t at = (data[i] + 256u * data[i + 1]) % (sizeof(WireHeader) - 1);
      std::memcpy(slot + at, data + i + 2, 2);
    }
  } else {
    std::memcpy(slot, data + 1, std::min(size - 1, sizeof(slot)));
  }
  try {
    (void)verify_header(transfer, slot, 0);
    WireHeader header, expected;
    std::memcpy(&header, slot, sizeof(header));
    std::memcpy(&expected, right, sizeof(expected));
    require(header.sequence == expected.sequence && header.bytes == expected.bytes);
    require(header.given == expected.given);
    require(std::memcmp(header.digest, expected.digest, sizeof(header.digest)) == 0);
  } catch (const PlanMismatch&) {  // NOLINT(bugprone-empty-catch): expected
  }
  return 0;
}
