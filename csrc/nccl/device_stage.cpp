#include "nccl/device_stage.h"

#include <cstring>

#include "device/device.h"

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
  for (const auto& [alignment, prepared] : prepared_) {
    if (prepared.is_captured) {
      operations_->keep(prepared.memory);
    } else {
      operations_->discard(prepared.memory);
    }
  }
}

void DeviceCombine::launch(const std::array<char*, kBuffers>& buffers, const uint32_t* failed,
                           DeviceStream stream) {
  if (plan_.is_empty()) return;
  CombineArguments arguments = prepared(alignment_of(buffers), stream);
  for (int i = 0; i < kBuffers; ++i) arguments.buffers[i] = buffers[i];
  arguments.failed = failed;
  const DeviceApi& api = operations_->api();
  check_device(api, api.launch_combine(arguments, stream), "launching a kernel");
}

CombineArguments DeviceCombine::prepared(int alignment, DeviceStream stream) {
  const std::lock_guard<std::mutex> locked(mutex_);
  auto found = prepared_.find(alignment);
  if (found == prepared_.end()) found = prepared_.emplace(alignment, prepare(alignment)).first;
  Prepared& prepared = found->second;
  if (prepared.memory != nullptr && !prepared.is_captured) {
    const DeviceApi& api = operations_->api();
    uint64_t capture = 0;
    check_device(api, api.capture_id(stream, &capture), "asking for a capture");
    prepared.is_captured = capture != 0;
  }
  return prepared.arguments;
}

DeviceCombine::Prepared DeviceCombine::prepare(int alignment) const {
  const CombineTable table = plan_.table(alignment);
  const size_t jobs_bytes = (table.jobs.size() * sizeof(CombineJob) + 15) / 16 * 16;
  const size_t views_bytes = table.views.size() * sizeof(CombineView);
  Prepared made;
  made.tables.resize(jobs_bytes + views_bytes);
  std::memcpy(made.tables.data(), table.jobs.data(), table.jobs.size() * sizeof(CombineJob));
  std::memcpy(made.tables.data() + jobs_bytes, table.views.data(), views_bytes);
  made.arguments = plan_.arguments(table);
  const char* begin = made.tables.data();
  if (made.tables.size() > operations_->api().most_inline_bytes()) {
    upload(made);
    begin = static_cast<const char*>(made.memory);
  } else {
    made.arguments.inline_bytes = static_cast<uint32_t>(made.tables.size());
  }
  made.arguments.jobs = reinterpret_cast<const CombineJob*>(begin);
  made.arguments.views = reinterpret_cast<const CombineView*>(begin + jobs_bytes);
  return made;
}

void DeviceCombine::upload(Prepared& prepared) const {
  // The upload must not become part of a graph that is being captured.
  const DeviceApi& api = operations_->api();
  const RelaxedCapture relaxed(api);
  DeviceStream stream = nullptr;
  check_device(api, api.create_stream(&stream), "creating a stream");
  int error = api.allocate(&prepared.memory, prepared.tables.size());
  if (error == 0) {
    error = api.copy(prepared.memory, prepared.tables.data(), prepared.tables.size(), stream);
  }
  if (error == 0) finish(api, stream);
  api.destroy_stream(stream);
  check_device(api, error, "copying the tables of a plan");
}

WireCall WireStep::at(const std::array<char*, kBuffers>& buffers) const {
  const auto address = [&](Buffer buffer, int64_t offset) {
    char* const base = buffers[static_cast<int>(buffer)];
    return base == nullptr ? nullptr : base + offset;
  };
  return {kind,  communicator, peer, address(from, from_offset), address(to, to_offset),
          count, dtype,        op};
}

}  // namespace gpudist
