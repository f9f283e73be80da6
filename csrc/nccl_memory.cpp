// Device memory that NCCL's messages start from and arrive in.
#include <algorithm>

#include "check.h"
#include "device.h"
#include "nccl_world.h"

namespace gpudist {

char* NcclWorld::allocate(size_t bytes) {
  void* memory = nullptr;
  const RelaxedCapture relaxed(device_api_);
  NcclCommunicator* const world = this->world();
  if (world == nullptr || nccl_->mem_alloc(&memory, bytes) != kNcclSuccess) {
    check_device(device_api_, device_api_.allocate(&memory, bytes), "allocating device memory");
    registrations_.push_back({static_cast<char*>(memory), false, nullptr});
    return static_cast<char*>(memory);
  }
  // Registered where it can be: then messages need no copy inside NCCL. It goes without as well.
  void* handle = nullptr;
  if (nccl_->comm_register(world->handle(), memory, bytes, &handle) != kNcclSuccess) {
    handle = nullptr;
  }
  registrations_.push_back({static_cast<char*>(memory), true, handle});
  return static_cast<char*>(memory);
}

void NcclWorld::release(char* memory) {
  const auto found =
      std::find_if(registrations_.begin(), registrations_.end(),
                   [&](const Registration& known) { return known.memory == memory; });
  if (found == registrations_.end()) return;
  NcclCommunicator* const world = this->world();
  if (found->handle != nullptr && world != nullptr && !world->is_over()) {
    nccl_->comm_deregister(world->handle(), found->handle);
  }
  if (found->is_nccls) {
    nccl_->mem_free(memory);
  } else {
    device_api_.release(memory);
  }
  registrations_.erase(found);
}

}  // namespace gpudist
