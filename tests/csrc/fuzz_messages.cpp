// Parsing of memory that another process writes: headers of messages, and loans. Used by libFuzzer
// and by the mutations in test_hostile.cpp.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/errors.h"
#include "core/message.h"
#include "host/mailbox.h"
#include "host/pulling.h"

namespace {

using namespace gpudist;

constexpr int64_t kBytes = 64 * 1024;
const Signature kSignature{"fuzz", "0123456789abcdef"};

void require(bool fine) {
  if (!fine) __builtin_trap();
}

Transfer receive_of(char* cells, const std::vector<BoxView>& boxes) {
  Transfer transfer;
  transfer.kind = Transfer::Kind::kReceive;
  transfer.peer = 1;
  transfer.bytes = kBytes;
  transfer.tensor = cells;
  transfer.boxes = &boxes;
  transfer.signature = &kSignature;
  transfer.sequence = 7;
  return transfer;
}

// An accepted loan has exactly the bytes of the message, and all its boxes can be walked.
void walk(Transfer& transfer) {
  int64_t left = transfer.bytes;
  while (left > 0) {
    const BoxStream::Run piece = transfer.source_stream.take(left);
    require(piece.bytes > 0 && piece.bytes <= left);
    left -= piece.bytes;
  }
  require(transfer.source_stream.done());
}

}  // namespace

// The first byte selects whether a valid header precedes the other bytes.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static std::vector<char> cells(kBytes);
  static std::vector<char> slot(kSlotBytes);
  const int64_t start = 0, stop = kBytes, stride = 1;
  const std::vector<BoxView> boxes{make_box_view(1, &start, &stop, &stride, 1)};
  Transfer transfer = receive_of(cells.data(), boxes);
  std::fill(slot.begin(), slot.end(), 0);
  const bool has_header = data[0] % 2 == 1;
  if (has_header) write_header(transfer, true, slot.data());
  const size_t offset = has_header ? kHeaderBytes : 0;
  std::memcpy(slot.data() + offset, data + 1, std::min(size - 1, slot.size() - offset));
  try {
    if (!verify_header(transfer, slot.data(), 0)) return 0;
    read_loan(slot.data() + kHeaderBytes, transfer);
    walk(transfer);
  } catch (const PlanMismatch&) {    // NOLINT(bugprone-empty-catch): expected
  } catch (const TransportError&) {  // NOLINT(bugprone-empty-catch)
  }
  return 0;
}
