#include "device_stage.h"

#include <cstring>

#include "device.h"

namespace gpudist {

namespace {

constexpr int kWidestLane = 16;

int alignment_of(const std::array<char*, kBuffers>& buffers) {
  uintptr_t bits = kWidestLane;
  for (const char* buffer : buffers) bits |= reinterpret_cast<uintptr_t>(buffer);
  return static_cast<int>(bits & (~bits + 1));
}

}  // namespace

DeviceCombine::~DeviceCombine() {
  if (!uploaded_.empty()) api_.relax_capture();
  for (const auto& [alignment, uploaded] : uploaded_) api_.release(uploaded.memory);
}

void DeviceCombine::launch(const std::array<char*, kBuffers>& buffers, const uint32_t* failed,
                           DeviceStream stream) {
  if (plan_.is_empty()) return;
  CombineArguments arguments = uploaded(alignment_of(buffers)).arguments;
  for (int i = 0; i < kBuffers; ++i) arguments.buffers[i] = buffers[i];
  arguments.failed = failed;
  check_device(api_, api_.launch_combine(arguments, stream), "launching a kernel");
}

const DeviceCombine::Uploaded& DeviceCombine::uploaded(int alignment) {
  const auto found = uploaded_.find(alignment);
  if (found != uploaded_.end()) return found->second;
  const CombineTable& table = plan_.table(alignment);
  const size_t jobs_bytes = (table.jobs.size() * sizeof(CombineJob) + 15) / 16 * 16;
  const size_t views_bytes = table.views.size() * sizeof(CombineView);
  std::vector<char> tables(jobs_bytes + views_bytes);
  std::memcpy(tables.data(), table.jobs.data(), table.jobs.size() * sizeof(CombineJob));
  std::memcpy(tables.data() + jobs_bytes, table.views.data(), views_bytes);

  // A graph may be being captured, of which this is no part.
  api_.relax_capture();
  DeviceStream stream = nullptr;
  Uploaded made;
  check_device(api_, api_.create_stream(&stream), "creating a stream");
  int error = api_.allocate(&made.memory, tables.size());
  if (error == 0) error = api_.copy(made.memory, tables.data(), tables.size(), stream);
  if (error == 0) finish(api_, stream);
  api_.destroy_stream(stream);
  check_device(api_, error, "copying the tables of a plan");

  made.arguments = plan_.arguments(table);
  made.arguments.jobs = static_cast<const CombineJob*>(made.memory);
  made.arguments.views = reinterpret_cast<const CombineView*>(static_cast<char*>(made.memory) +
                                                              jobs_bytes);
  return uploaded_.emplace(alignment, made).first->second;
}

WireCall WireStep::at(const std::array<char*, kBuffers>& buffers) const {
  const auto address = [&](Buffer buffer, int64_t offset) {
    char* const base = buffers[static_cast<int>(buffer)];
    return base == nullptr ? nullptr : base + offset;
  };
  return {kind, communicator, peer, address(from, from_offset), address(to, to_offset),
          count, dtype, op};
}

}  // namespace gpudist
