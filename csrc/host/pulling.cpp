#include "host/pulling.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "core/errors.h"
#include "core/message.h"
#include "core/recycling.h"
#include "host/mailbox.h"

namespace gpudist {

namespace {

// Measured on two cores: below this size, two copies through the mailbox are as fast as a system
// call.
constexpr int64_t kLoanBytes = 32 * 1024;
// If the sender expects no answer, smaller messages are sent, so that it does not wait for the
// receiver to read its cells.
constexpr int64_t kUnansweredLoanBytes = 192 * 1024;
// From this size on, packing short rows and offering the copy is faster than sending.
constexpr int64_t kPackedLoanBytes = 128 * 1024;
// For the system, a row costs as much as copying a few kilobytes, so shorter rows are packed.
constexpr int64_t kLongRowBytes = 4 * 1024;
// Shorter rows of the receiver are filled from a buffer that stays in the cache.
constexpr int64_t kDirectRowBytes = 512;
constexpr int64_t kBounceBytes = 256 * 1024;
constexpr int kPieces = 512;

struct Loan {
  uint64_t address;
  uint64_t boxes;
};

constexpr uint64_t kMaxBoxes = (kSlotBytes - kHeaderBytes - sizeof(Loan)) / sizeof(BoxView);

int64_t rows_of(const std::vector<BoxView>& boxes) {
  int64_t rows = 0;
  for (const BoxView& box : boxes) rows += box.rows;
  return rows;
}

// Split the next bytes of a stream, at most `bytes`, into pieces of memory; returns their total
// size.
int64_t pieces_of(BoxStream& stream, char* base, int64_t bytes, iovec* pieces, int* count) {
  int64_t taken = 0;
  *count = 0;
  while (taken < bytes && *count < kPieces) {
    const BoxStream::Run piece = stream.take(bytes - taken);
    pieces[(*count)++] = {base + piece.offset, static_cast<size_t>(piece.bytes)};
    taken += piece.bytes;
  }
  return taken;
}

// Read all bytes; returns false if the sender's memory no longer exists.
bool read(pid_t pid, const iovec* local, int locals, const iovec* remote, int remotes,
          int64_t bytes) {
  const ssize_t got = process_vm_readv(pid, local, locals, remote, remotes, 0);
  if (got == bytes) return true;
  // The sender has ended, and with it its memory. The thread that waits for it reports the cause.
  if (got >= 0 || errno == ESRCH || errno == EFAULT) return false;
  check_call(got, "process_vm_readv");
  return false;
}

}  // namespace

bool can_pull(pid_t pid, uint64_t address, uint64_t expected) {
  uint64_t found = 0;
  const iovec local{&found, sizeof(found)};
  const iovec remote{reinterpret_cast<void*>(address), sizeof(found)};
  return process_vm_readv(pid, &local, 1, &remote, 1, 0) == sizeof(found) && found == expected;
}

namespace {

bool can_lend_rows(const Transfer& send, bool is_here) {
  if (send.boxes->size() > kMaxBoxes) return false;
  return is_here || send.bytes >= kLongRowBytes * rows_of(*send.boxes);
}

void pack(Transfer& send) {
  const auto block = recycling_pool().acquire(send.bytes);
  send.packed = {block->data, [block](char*) { recycling_pool().release(block); }};
  BoxStream(send.boxes).gather(send.tensor, send.packed.get(), send.bytes);
  const int64_t start = 0, stride = 1;
  send.packed_boxes = {make_box_view(1, &start, &send.bytes, &stride, 1)};
}

}  // namespace

bool worth_lending(const Transfer& send, bool is_here) {
  if (!send.is_answered && send.bytes < kUnansweredLoanBytes) return false;
  return send.bytes >= kPackedLoanBytes ||
         (send.bytes >= kLoanBytes && can_lend_rows(send, is_here));
}

void write_loan(Transfer& send, char* slot, bool is_here) {
  const bool packs = !can_lend_rows(send, is_here);
  if (packs) pack(send);
  const char* address = packs ? send.packed.get() : send.tensor;
  const std::vector<BoxView>& boxes = packs ? send.packed_boxes : *send.boxes;
  const Loan loan{reinterpret_cast<uint64_t>(address), boxes.size()};
  std::memcpy(slot, &loan, sizeof(loan));
  std::memcpy(slot + sizeof(loan), boxes.data(), loan.boxes * sizeof(BoxView));
}

namespace {

// Received data is untrusted: check that the box can be walked and that its addresses do not
// overflow.
bool is_sound(const BoxView& box) {
  constexpr int64_t kMost = int64_t{1} << 56;
  if (box.dims < 0 || box.dims > kMaxDims || box.row_bytes <= 0 || box.rows < 0) return false;
  if (box.rows == 0) return box.dims == 0;
  if (box.rows > kMost / box.row_bytes || std::abs(box.offset / 2) > kMost / 2) return false;
  int64_t rows = 1;
  for (int d = 0; d < box.dims; ++d) {
    if (box.shape[d] <= 0 || box.shape[d] > box.rows / rows) return false;
    if (std::abs(box.stride[d] / 2) > kMost / 2 / box.shape[d]) return false;
    rows *= box.shape[d];
  }
  return rows == box.rows;
}

// Return whether the boxes have `bytes` bytes in total.
bool make_up(const std::vector<BoxView>& boxes, int64_t bytes) {
  for (const BoxView& box : boxes) {
    if (!is_sound(box) || box.bytes() > bytes) return false;
    bytes -= box.bytes();
  }
  return bytes == 0;
}

std::string not_a_loan(const Transfer& receive) {
  return "rank " + std::to_string(receive.peer) + " offers cells other than the " +
         std::to_string(receive.bytes) + " bytes of '" + receive.signature->label +
         "'; run the same gpudist on every rank";
}

}  // namespace

void read_loan(const char* slot, Transfer& receive) {
  Loan loan;
  std::memcpy(&loan, slot, sizeof(loan));
  if (loan.boxes == 0 || loan.boxes > kMaxBoxes) throw TransportError(not_a_loan(receive));
  receive.source = reinterpret_cast<const char*>(loan.address);
  receive.pulled_boxes.resize(loan.boxes);
  std::memcpy(receive.pulled_boxes.data(), slot + sizeof(loan), loan.boxes * sizeof(BoxView));
  if (!make_up(receive.pulled_boxes, receive.bytes)) throw TransportError(not_a_loan(receive));
  receive.source_stream = BoxStream(&receive.pulled_boxes);
  receive.pulls = true;
}

namespace {

// Read rows directly into their destination.
int64_t pull_directly(pid_t pid, Transfer& receive, int64_t bytes) {
  iovec remote[kPieces], local[kPieces];
  int remotes, locals;
  char* const lent = const_cast<char*>(receive.source);  // only read
  BoxStream source = receive.source_stream, target = receive.stream;
  bytes = pieces_of(target, receive.tensor, bytes, local, &locals);
  const int64_t reached = pieces_of(source, lent, bytes, remote, &remotes);
  if (reached < bytes) {
    target = receive.stream;
    bytes = pieces_of(target, receive.tensor, reached, local, &locals);
  }
  if (!read(pid, local, locals, remote, remotes, bytes)) return 0;
  receive.source_stream = source;
  receive.stream = target;
  return bytes;
}

// Read into a buffer that stays in the cache, then unpack.
int64_t pull_and_unpack(pid_t pid, Transfer& receive, int64_t bytes) {
  alignas(64) thread_local char bounce[kBounceBytes];
  iovec remote[kPieces];
  int remotes;
  BoxStream source = receive.source_stream;
  bytes = pieces_of(source, const_cast<char*>(receive.source), std::min(bytes, kBounceBytes),
                    remote, &remotes);
  const iovec local{bounce, static_cast<size_t>(bytes)};
  if (!read(pid, &local, 1, remote, remotes, bytes)) return 0;
  receive.unpack(bounce, bytes);
  receive.source_stream = source;
  return bytes;
}

}  // namespace

int64_t pull(pid_t pid, Transfer& receive, int64_t bytes) {
  const bool direct = !receive.adds && receive.own == nullptr &&
                      receive.bytes >= kDirectRowBytes * rows_of(*receive.boxes);
  return direct ? pull_directly(pid, receive, bytes) : pull_and_unpack(pid, receive, bytes);
}

int64_t pull_here(Transfer& receive, int64_t bytes) {
  for (int64_t left = bytes; left > 0;) {
    const BoxStream::Run piece = receive.source_stream.take(left);
    receive.unpack(receive.source + piece.offset, piece.bytes);
    left -= piece.bytes;
  }
  return bytes;
}

}  // namespace gpudist
