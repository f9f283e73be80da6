#include "nccl_wire.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>

namespace gpudist::doubles {

struct Wire::Header {
  uint64_t nonce;
  std::atomic<int> size;
  std::atomic<int> joined;
  std::atomic<int> broken;  // 0: no, 1: the text is being written, 2: yes
  char text[1024];
};

namespace {

constexpr char kMark[16] = "gpudist-double";
constexpr size_t kHeaderBytes = 4096;

size_t slots_offset(int size) {
  return kHeaderBytes + size * sizeof(RankLine);
}
size_t channels_offset(int size) {
  return slots_offset(size) + size * 2 * kSlotBytes;
}
size_t wire_bytes(int size) {
  return channels_offset(size) + static_cast<size_t>(size) * size * sizeof(Channel);
}

void* map_file(int file, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

bool Wire::make(Address* address) {
  const int file = memfd_create("gpudist-double", MFD_CLOEXEC);
  if (file < 0) return false;
  memcpy(address->mark, kMark, sizeof(kMark));
  address->pid = getpid();
  address->file = file;
  if (getrandom(&address->nonce, sizeof(address->nonce), 0) < 0) address->nonce = file;
  // Sized for the maximum number of ranks: untouched pages take no memory.
  void* memory =
      ftruncate(file, wire_bytes(kMaxRanks)) == 0 ? map_file(file, kHeaderBytes) : nullptr;
  if (memory == nullptr) {
    close(file);
    return false;
  }
  static_cast<Header*>(memory)->nonce = address->nonce;
  munmap(memory, kHeaderBytes);
  return true;
}

void Wire::forget(const Address& address) {
  if (address.pid == getpid()) close(address.file);
}

std::shared_ptr<Wire> Wire::open(const Address& address, int size, std::string* why) {
  if (memcmp(address.mark, kMark, sizeof(kMark)) != 0) {
    *why = "the unique id is none of the double's";
    return nullptr;
  }
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) {
    *why = "the process that made the unique id is gone: " + std::string(std::strerror(errno));
    return nullptr;
  }
  const size_t bytes = wire_bytes(size);
  const bool is_ours = lseek(file, 0, SEEK_END) == static_cast<off_t>(wire_bytes(kMaxRanks));
  void* memory = is_ours ? map_file(file, bytes) : nullptr;
  close(file);
  if (memory == nullptr) {
    *why = is_ours ? "no memory" : "the unique id is no longer valid";
    return nullptr;
  }
  std::shared_ptr<Wire> wire(new Wire(memory, bytes, size, address));
  if (wire->header_->nonce != address.nonce) {
    *why = "the unique id is no longer valid";
    return nullptr;
  }
  int agreed = 0;
  if (!wire->header_->size.compare_exchange_strong(agreed, size) && agreed != size) {
    *why = "another rank says there are " + std::to_string(agreed) + " ranks, this one " +
           std::to_string(size);
    wire->break_all(*why);
    return nullptr;
  }
  return wire;
}

Wire::Wire(void* memory, size_t bytes, int size, const Address& address)
    : header_(static_cast<Header*>(memory)), bytes_(bytes), size_(size), address_(address) {
  char* base = static_cast<char*>(memory);
  lines_ = reinterpret_cast<RankLine*>(base + kHeaderBytes);
  slots_ = base + slots_offset(size);
  channels_ = reinterpret_cast<Channel*>(base + channels_offset(size));
}

Wire::~Wire() {
  munmap(header_, bytes_);
}

char* Wire::slot(int rank, uint64_t round) {
  return slots_ + (static_cast<size_t>(rank) * 2 + round % 2) * kSlotBytes;
}

bool Wire::join(int rank) {
  RankState absent = RankState::kAbsent;
  if (!line(rank).state.compare_exchange_strong(absent, RankState::kJoined)) return false;
  ++header_->joined;
  ring_all();
  return true;
}

bool Wire::all_joined() const {
  return header_->joined == size_;
}

int Wire::find_destroyed() {
  for (int rank = 0; rank < size_; ++rank) {
    if (line(rank).state == RankState::kDestroyed) return rank;
  }
  return -1;
}

void Wire::ring(int rank) {
  RankLine& to = line(rank);
  ++to.bell;
  if (to.sleepers == 0) return;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&to.bell), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
          0);
}

void Wire::ring_all() {
  for (int rank = 0; rank < size_; ++rank) ring(rank);
}

bool Wire::wait(int rank, const std::atomic<bool>& is_aborted, const std::function<bool()>& done) {
  RankLine& mine = line(rank);
  for (int looks = 0;; ++looks) {
    const uint32_t seen = mine.bell;
    if (is_aborted) return false;
    if (done()) return true;
    if (is_broken()) return false;
    if (looks < kLooks) {
      sched_yield();
      continue;
    }
    const timespec limit{0, kSleepNs};
    ++mine.sleepers;
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&mine.bell), FUTEX_WAIT, seen, &limit, nullptr,
            0);
    --mine.sleepers;
  }
}

void Wire::break_all(const std::string& text) {
  int whole = 0;
  if (!header_->broken.compare_exchange_strong(whole, 1)) return;
  const size_t bytes = std::min(text.size(), sizeof(header_->text) - 1);
  memcpy(header_->text, text.data(), bytes);
  header_->text[bytes] = 0;
  header_->broken = 2;
  ring_all();
}

bool Wire::is_broken() const {
  return header_->broken == 2;
}

std::string Wire::breakage() const {
  return is_broken() ? header_->text : "";
}

}  // namespace gpudist::doubles
