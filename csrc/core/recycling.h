// Pool of memory for large outputs: mapping new pages costs several times the copy into them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>

namespace gpudist {

// Pool of blocks of anonymous pages. All members are thread-safe.
class RecyclingPool {
 public:
  struct Block {
    char* data;         // page-aligned; huge-page-aligned if at least as large
    size_t bytes;       // size of the block's class
    uint64_t released;  // sequence number of its last release
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
  // Frees the blocks in use, too.
  ~RecyclingPool();

  // Return a block of at least `bytes` with undefined content. Throws std::bad_alloc.
  Handle acquire(size_t bytes);
  // Keep the block for reuse. Beyond the limit of idle bytes, the least recently used blocks are
  // returned to the system.
  void release(Handle block) noexcept;
  // Return all idle blocks to the system.
  void empty() noexcept;
  void set_limit(size_t bytes) noexcept;
  Statistics statistics() const;
  // Whether `data` is the start of a block in use that nobody has used before, whose pages may not
  // exist yet. Fast for a block that was acquired late.
  bool is_new(const char* data) const;

  // Size of the class that `bytes` belongs to: eight classes per power of two, so at most 1/8 more.
  static size_t class_bytes(size_t bytes);

  // Called around fork(), so that no other thread is in the middle of a change. The child keeps the
  // blocks its tensors use; it drops its idle blocks, because otherwise the parent's next write to
  // them would copy pages.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  // Move the least recently used idle blocks beyond `limit_bytes` to `surplus`.
  void shed(size_t limit_bytes, Blocks& surplus) noexcept;

  mutable std::mutex mutex_;
  size_t limit_bytes_;
  // A block keeps its list node, so that release() does not allocate.
  Blocks in_use_;
  std::map<size_t, Blocks> idle_;  // by size of the class; the least recently used first
  size_t in_use_bytes_ = 0;
  size_t idle_bytes_ = 0;
  uint64_t releases_ = 0;
  uint64_t hits_ = 0;
  uint64_t misses_ = 0;
};

// The pool of this process.
RecyclingPool& recycling_pool();

}  // namespace gpudist
