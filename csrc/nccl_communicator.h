// One NCCL communicator: aborted at most once, released once, never used after that.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_api.h"

namespace gpudist {

class NcclCommunicator {
 public:
  // What a wait for peers does now and then: it throws when there is nothing to wait for any more.
  using Look = std::function<void()>;

  // Collective over `members`, of which this rank is number `rank`. Throws TransportError, or what
  // `look` throws.
  static std::unique_ptr<NcclCommunicator> make(const NcclApi& api, const DeviceApi& device_api,
                                                int device, const NcclUniqueId& id,
                                                std::vector<int> members, int rank,
                                                const Look& look);
  // One that belongs to somebody else, who also ends it.
  static std::unique_ptr<NcclCommunicator> adopt(const NcclApi& api, NcclComm comm,
                                                 std::vector<int> members);
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;

  // Collective over this communicator: the ranks of one color, by key, make one; `members` are
  // their world ranks. A rank of no color (negative) gets none.
  std::unique_ptr<NcclCommunicator> split(const DeviceApi& device_api, int device, int color,
                                          int key, std::vector<int> members, const Look& look);

  NcclComm handle() const { return comm_; }
  const std::vector<int>& members() const { return members_; }
  bool is_over();

  // What broke, or nothing.
  std::string async_error();
  // From any thread; the operations under way end, and nothing may be started any more.
  void abort();
  // When nothing is under way; waits for peers at most `seconds`, then aborts.
  void close(double seconds);

 private:
  NcclCommunicator(const NcclApi& api, NcclComm comm, std::vector<int> members, bool is_ours)
      : api_(api), comm_(comm), members_(std::move(members)), is_ours_(is_ours) {}

  const NcclApi& api_;
  const NcclComm comm_;
  const std::vector<int> members_;
  const bool is_ours_;
  std::mutex mutex_;
  bool is_over_ = false;
};

}  // namespace gpudist
