// Damaged messages are refused, and segments can be changed only by their owner.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <random>

#include "host/mailbox.h"
#include "host/segment.h"
#include "test.h"
#include "world.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using namespace gpudist;

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

// Random headers, for builds without libFuzzer: the first half of them differ from the right one in
// few bytes.
void random_headers_are_refused_or_right() {
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::vector<uint8_t> input(1 + 4 * (random() % 5));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random());
    input[0] = i < 10'000;
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
}

}  // namespace

void test_hostile() {
  segments_are_their_owners();
  what_is_no_segment_is_refused();
  random_headers_are_refused_or_right();
}
