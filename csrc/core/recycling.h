// Memory for large outputs, kept for the next one: new pages cost several times the copy into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>

namespace gpudist {

// Blocks of anonymous pages. Every member may be called from any thread.
class RecyclingPool {
 public:
  struct Block {
    char* data;         // starts a page, and a huge page if it is as large
    size_t bytes;       // of its class
    uint64_t released;  // number of its last release
  };
  using Blocks = std::list<Block>;
  using Handle = Blocks::iterator;

  struct Statistics {
    size_t in_use_bytes;
    size_t idle_bytes;
    uint64_t hits;
    uint64_t misses;
    size_t limit_bytes;
  };

  explicit RecyclingPool(size_t limit_bytes) : limit_bytes_(limit_bytes) {}
  RecyclingPool(const RecyclingPool&) = delete;
  // Takes the blocks in use with it.
  ~RecyclingPool();

  // A block of at least `bytes`, of undefined content; throws std::bad_alloc.
  Handle acquire(size_t bytes);
  // Keep the block for later. The least recently used are given back beyond the limit of idle
  // bytes.
  void release(Handle block) noexcept;
  // Give all idle blocks back to the system.
  void empty() noexcept;
  void set_limit(size_t bytes) noexcept;
  Statistics statistics() const;

  // Blocks of one class serve each other's sizes: eight to an octave, at most 1/8 more than asked.
  static size_t class_bytes(size_t bytes);

  // Around fork(): no other thread is halfway through. The child keeps what its tensors use; its
  // idle blocks go, lest the parent's next write to them copies pages.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  // Move the least recently used idle blocks beyond `limit_bytes` to `surplus`.
  void shed(size_t limit_bytes, Blocks& surplus) noexcept;

  mutable std::mutex mutex_;
  size_t limit_bytes_;
  // A block keeps its list node for life, so that releasing allocates nothing.
  Blocks in_use_;
  std::map<size_t, Blocks> idle_;  // by bytes of the class; the least recently used first
  size_t in_use_bytes_ = 0;
  size_t idle_bytes_ = 0;
  uint64_t releases_ = 0;
  uint64_t hits_ = 0;
  uint64_t misses_ = 0;
};

// The pool of this process.
RecyclingPool& recycling_pool();

}  // namespace gpudist
