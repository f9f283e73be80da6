// Damaged messages are refused, and segments can be changed only by their owner.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <random>

#include "host/mailbox.h"
#include "host/pulling.h"
#include "host/segment.h"
#include "test.h"
#include "world.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using namespace gpudist;

constexpr int64_t kBytes = 64 * 1024;

std::string descriptor_path(int fd) {
  return "/proc/self/fd/" + std::to_string(fd);
}

std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const TransportError& error) {
    return error.what();
  }
  return "";
}

// Run in a child process, which does not find the segment in its own table of mappings.
std::string refusal_by_a_child(int fd, size_t bytes) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t parent = getpid();
  if (fork() == 0) {
    const std::string text = refusal_of([&] { Segment(parent, fd, bytes); });
    const ssize_t written = write(ends[1], text.data(), text.size());
    _exit(written < 0);
  }
  close(ends[1]);
  char text[512];
  const ssize_t got = read(ends[0], text, sizeof(text));
  close(ends[0]);
  return {text, got > 0 ? static_cast<size_t>(got) : 0};
}

void segments_are_their_owners() {
  const Segment segment(4096, true);
  const int fd = static_cast<int>(segment.id());
  struct stat status;
  CHECK(stat(descriptor_path(fd).c_str(), &status) == 0);
  CHECK((status.st_mode & 07777) == 0600);
  CHECK(status.st_uid == geteuid());
  // The size is sealed: peers may rely on it.
  CHECK(ftruncate(fd, 1) != 0 && ftruncate(fd, 8192) != 0);
  CHECK(refusal_by_a_child(fd, 4096).empty());
}

void what_is_no_segment_is_refused() {
  const char* refused = "is not a shared segment of this user and size";
  const Segment segment(4096, true);
  const int fd = static_cast<int>(segment.id());
  CHECK(refusal_by_a_child(fd, 8192).find(refused) != std::string::npos);
  const int unsealed = memfd_create("other", MFD_CLOEXEC);
  CHECK(ftruncate(unsealed, 4096) == 0);
  CHECK(refusal_by_a_child(unsealed, 4096).find(refused) != std::string::npos);
  close(unsealed);
  int ends[2];
  CHECK(pipe(ends) == 0);
  CHECK(refusal_by_a_child(ends[0], 4096).find(refused) != std::string::npos);
  close(ends[0]);
  close(ends[1]);
  CHECK(refusal_by_a_child(99999, 4096).find("is gone") != std::string::npos);
}

// The bytes behind a header that describe a loan of `boxes`.
std::vector<char> loan_of(uint64_t count, const std::vector<BoxView>& boxes) {
  const uint64_t address = 4096;
  std::vector<char> bytes(2 * sizeof(uint64_t) + boxes.size() * sizeof(BoxView));
  std::memcpy(bytes.data(), &address, sizeof(address));
  std::memcpy(bytes.data() + sizeof(address), &count, sizeof(count));
  std::memcpy(bytes.data() + 2 * sizeof(uint64_t), boxes.data(), boxes.size() * sizeof(BoxView));
  return bytes;
}

BoxView rows_of(int64_t rows, int64_t row_bytes) {
  BoxView box;
  box.dims = 1;
  box.rows = box.shape[0] = rows;
  box.row_bytes = row_bytes;
  box.stride[0] = 2 * row_bytes;
  return box;
}

std::string refusal_of_loan(uint64_t count, const std::vector<BoxView>& boxes) {
  const Signature signature = signature_of("loan");
  std::vector<char> data(kBytes);
  Bytes receive(Transfer::Kind::kReceive, 1, data, signature);
  std::vector<char> slot(kSlotBytes);
  const std::vector<char> loan = loan_of(count, boxes);
  std::memcpy(slot.data(), loan.data(), loan.size());
  return refusal_of([&] { read_loan(slot.data(), receive.transfer); });
}

void loans_that_make_no_sense_are_refused() {
  const BoxView half = rows_of(8, kBytes / 16);
  CHECK(refusal_of_loan(2, {half, half}).empty());
  CHECK(refusal_of_loan(3, {half, rows_of(0, 1), half}) != "");
  const auto is_refused = [](uint64_t count, const std::vector<BoxView>& boxes) {
    return refusal_of_loan(count, boxes)
               .find("offers cells other than the 65536 bytes of 'loan'") != std::string::npos;
  };
  CHECK(is_refused(1, {half}));
  CHECK(is_refused(3, {half, half, half}));
  CHECK(is_refused(uint64_t{1} << 60, {half, half}));
  CHECK(is_refused(uint64_t{1} << 10, {half, half}));
  BoxView bad = half;
  bad.dims = kMaxDims + 1;
  CHECK(is_refused(2, {half, bad}));
  bad = half;
  bad.shape[0] = 0;
  CHECK(is_refused(2, {half, bad}));
  bad = half;
  bad.shape[0] = 7;
  CHECK(is_refused(2, {half, bad}));
  bad = half;
  bad.row_bytes = -half.row_bytes;
  CHECK(is_refused(2, {half, bad}));
  bad = half;
  bad.stride[0] = int64_t{1} << 62;
  CHECK(is_refused(2, {half, bad}));
  bad = half;
  bad.rows = bad.shape[0] = int64_t{1} << 62;
  CHECK(is_refused(2, {half, bad}));
}

// Random mutations of valid loans, for builds without libFuzzer.
void random_damage_is_refused_or_harmless() {
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    const std::vector<char> loan = loan_of(2, {rows_of(8, kBytes / 16), rows_of(8, kBytes / 16)});
    std::vector<uint8_t> input{1};
    input.insert(input.end(), loan.begin(), loan.end());
    for (unsigned changes = random() % 5; changes > 0; --changes) {
      const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff, static_cast<uint8_t>(random())};
      input[random() % input.size()] = values[random() % 6];
    }
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}

}  // namespace

void test_hostile() {
  segments_are_their_owners();
  what_is_no_segment_is_refused();
  loans_that_make_no_sense_are_refused();
  random_damage_is_refused_or_harmless();
}
