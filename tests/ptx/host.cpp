// For programs without the doubles: host memory, and one stream that runs everything immediately.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace gpudist::ptx {

namespace {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;

int allocate(void** memory, size_t bytes) {
  constexpr size_t kAlignment = 512;
  *memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  return *memory == nullptr ? kOutOfMemory : kSuccess;
}
int release(void* memory) {
  std::free(memory);
  return kSuccess;
}
int copy(void* to, const void* from, size_t bytes, DeviceStream) {
  std::memcpy(to, from, bytes);
  return kSuccess;
}
// One device, whose context every thread has.
int get_context(DeviceContext* context) {
  static char only;
  *context = &only;
  return kSuccess;
}
int context_of(int, DeviceContext* context) {
  return get_context(context);
}
int set_context(DeviceContext) {
  return kSuccess;
}
int check_kernels() {
  return kSuccess;
}
int multiprocessors(int, int* number) {
  *number = 2;
  return kSuccess;
}
int launch_combine(const CombineArguments&, DeviceStream) {
  return kSuccess;
}

int launch_random(const RandomArguments&, DeviceStream) {
  return kSuccess;
}

DeviceApi make_api() {
  DeviceApi api{};
  api.context_of = context_of;
  api.get_context = get_context;
  api.set_context = set_context;
  api.check_kernels = check_kernels;
  api.allocate = allocate;
  api.release = release;
  api.allocate_pinned = allocate;
  api.release_pinned = release;
  api.copy = copy;
  api.multiprocessors = multiprocessors;
  api.launch_combine = launch_combine;
  api.launch_random = launch_random;
  return api;
}

}  // namespace

const DeviceApi& device_below() {
  static const DeviceApi api = make_api();
  return api;
}

void put_on_stream(DeviceStream, std::function<void()> work) {
  work();
}

}  // namespace gpudist::ptx
