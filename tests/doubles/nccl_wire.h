// The memory that the ranks of one communicator of the NCCL double share, and how they wait.
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
constexpr int kLooks = 20;            // with yields between them, before a rank sleeps
constexpr long kSleepNs = 5'000'000;  // at most, until it looks again

// Where the memory is: a file without a name, held open by the process that made it.
struct Address {
  char mark[16];
  int pid;
  int file;
  uint64_t nonce;
};

// What the ranks of a collective have to agree on.
struct Agreement {
  int kind;
  int dtype;
  int op;
  int root;
  uint64_t count;
  bool is_registered;  // the memory that the rank uses
};

struct SplitOffer {
  int color;
  int key;
  Address part;  // of the first member of a color
};

enum class RankState : uint32_t { kAbsent, kJoined, kDestroyed };

// What one rank tells the others. Numbers count from the communicator's beginning; what belongs to
// a number lies at its parity: nobody is two ahead of another.
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

// The bytes from one rank to another, on their way.
struct Channel {
  alignas(64) std::atomic<uint64_t> written;
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char ring[kRingBytes];
};

class Wire {
 public:
  // New memory; the file stays open until forget().
  static bool make(Address* address);
  static void forget(const Address& address);
  // Null, and why, where it cannot be opened.
  static std::shared_ptr<Wire> open(const Address& address, int size, std::string* why);
  ~Wire();
  Wire(const Wire&) = delete;

  int size() const { return size_; }
  const Address& address() const { return address_; }
  RankLine& line(int rank) { return lines_[rank]; }
  char* slot(int rank, uint64_t round);
  Channel& channel(int from, int to) { return channels_[from * size_ + to]; }

  // False where another has this rank already.
  bool join(int rank);
  bool all_joined() const;
  // The first of the ranks that was destroyed, or -1.
  int find_destroyed();

  // Let a rank look again.
  void ring(int rank);
  void ring_all();
  // Wait as `rank` for `done`; false where `is_aborted` or the wire's breaking ended the wait.
  bool wait(int rank, const std::atomic<bool>& is_aborted, const std::function<bool()>& done);

  // Set the error of all ranks; the first text stays.
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
