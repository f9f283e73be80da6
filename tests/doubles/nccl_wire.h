// Memory shared by the ranks of one communicator of the NCCL double, and waiting for changes to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace gpudist::doubles {

constexpr int kMaxRanks = 64;
constexpr size_t kRingBytes = 64 << 10;
constexpr size_t kSlotBytes = 64 << 10;
constexpr int kLooks = 20;            // checks, with yields between them, before a rank sleeps
constexpr long kSleepNs = 5'000'000;  // longest sleep before the next check

// Location of the memory: a file without a name, kept open by the process that created it.
struct Address {
  char mark[16];
  int pid;
  int file;
  uint64_t nonce;
};

// Properties of a collective on which all ranks must agree.
struct Agreement {
  int kind;
  int dtype;
  int op;
  int root;
  uint64_t count;
  bool is_registered;  // whether the memory the rank uses is registered
};

struct SplitOffer {
  int color;
  int key;
  Address part;  // of the first member of a color
};

enum class RankState : uint32_t { kAbsent, kJoined, kDestroyed };

// State that one rank publishes. Counters start with the communicator. Data for number n is at
// index n % 2: no rank is two numbers ahead of another.
struct alignas(64) RankLine {
  std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
  std::atomic<RankState> state;
  std::atomic<uint64_t> entered;  // collectives
  std::atomic<uint64_t> written;  // rounds of collectives
  std::atomic<uint64_t> splits_entered;
  std::atomic<uint64_t> splits_made;
  Agreement agreements[2];
  SplitOffer offers[2];
};

// Bytes in flight from one rank to another.
struct Channel {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char ring[kRingBytes];
};

class Wire {
 public:
  // Create the memory; its file stays open until forget().
  static bool make(Address* address);
  static void forget(const Address& address);
  // Returns null, and the reason in `why`, if it cannot be opened.
  static std::shared_ptr<Wire> open(const Address& address, int size, std::string* why);
  ~Wire();
  Wire(const Wire&) = delete;

  int size() const { return size_; }
  const Address& address() const { return address_; }
  RankLine& line(int rank) { return lines_[rank]; }
  char* slot(int rank, uint64_t round);
  Channel& channel(int from, int to) { return channels_[from * size_ + to]; }

  // Returns false if the rank is already taken.
  bool join(int rank);
  bool all_joined() const;
  // First rank that has been destroyed, or -1.
  int find_destroyed();

  // Wake a rank so that it checks its condition again.
  void ring(int rank);
  void ring_all();
  // Wait as `rank` for `done`. Returns false if `is_aborted` or an error of the wire ended the
  // wait.
  bool wait(int rank, const std::atomic<bool>& is_aborted, const std::function<bool()>& done);

  // Set the error of all ranks; the first text is kept.
  void break_all(const std::string& text);
  bool is_broken() const;
  std::string breakage() const;

 private:
  struct Header;
  Wire(void* memory, size_t bytes, int size, const Address& address);

  Header* header_;
  RankLine* lines_;
  char* slots_;
  Channel* channels_;
  size_t bytes_;
  int size_;
  Address address_;
};

}  // namespace gpudist::doubles
