// A test double of the CUDA driver, whose device memory is host memory. Nothing it does is a
// result of CUDA.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "core/norm_body.h"
#include "core/random_body.h"
#include "device_double.h"
#include "hooks.h"
#include "memory_double.h"
#include "nccl_group.h"
#include "stream_double.h"

namespace gpudist {

namespace doubles {

namespace {

struct Objects {
  std::mutex mutex;
  std::map<DeviceEvent, std::shared_ptr<Event>> events;
};

Objects& objects() {
  static Objects& objects = *new Objects;
  return objects;
}

thread_local int capture_mode = 0;

bool capture_forbids() {
  return capture_mode != kRelaxedCapture && any_capture();
}

std::shared_ptr<Event> find_event(DeviceEvent event) {
  const std::lock_guard<std::mutex> locked(objects().mutex);
  const auto found = objects().events.find(event);
  return found == objects().events.end() ? nullptr : found->second;
}

// Checks at the start of every call that enqueues work.
int check_stream(const char* call, DeviceStream stream) {
  if (const int error = begin_call(call)) return error;
  if (!is_stream(stream)) return refuse(kInvalidHandle, std::string(call) + ": no such stream");
  if (group_uses(stream)) {
    return refuse(kInvalidHandle,
                  std::string(call) + ": before the end of a group with operations on this stream");
  }
  return kSuccess;
}

int version(int* version) {
  *version = 13000;
  return kSuccess;
}

int count_devices(int* count) {
  if (device_call_fails("device_count")) return kUnknown;
  *count = static_cast<int>(setting("devices"));
  return kSuccess;
}

int capability(int device, int* capability) {
  if (device < 0 || device >= setting("devices")) return kInvalidDevice;
  *capability = 90;
  return kSuccess;
}

int check_kernels() {
  if (const int error = pass_driver("check_kernels")) return error;
  return device_call_fails("check_kernels") ? kNoKernelImage : kSuccess;
}

int allocate_as(MemoryKind kind, const char* call, void** memory, size_t bytes) {
  if (device_call_fails(call)) return kOutOfMemory;
  if (const int error = pass_driver(call)) return error;
  if (capture_forbids()) return refuse(kCaptureUnsupported, std::string(call) + ": in a capture");
  *memory = take_memory(kind, current_device(), bytes);
  if (*memory == nullptr) return bytes == 0 ? kSuccess : kOutOfMemory;
  count_call(call);
  return kSuccess;
}

// Waits for all work on the device, without a timeout.
int release_as(MemoryKind kind, const char* call, void* memory) {
  if (const int error = begin_call(call)) return error;
  if (capture_forbids()) return refuse(kCaptureUnsupported, std::string(call) + ": in a capture");
  if (memory == nullptr) return kSuccess;
  const int device = device_of(kind, memory);
  if (device < 0) {
    return refuse(kInvalidValue, std::string(call) + ": memory that was not allocated so");
  }
  count_call(call);
  wait_until_idle(device);
  end_memory(memory, call);
  return kSuccess;
}

int allocate(void** memory, size_t bytes) {
  return allocate_as(MemoryKind::kDevice, "allocate", memory, bytes);
}
int release(void* memory) {
  return release_as(MemoryKind::kDevice, "release", memory);
}
int allocate_pinned(void** memory, size_t bytes) {
  return allocate_as(MemoryKind::kPinned, "allocate_pinned", memory, bytes);
}
int release_pinned(void* memory) {
  return release_as(MemoryKind::kPinned, "release_pinned", memory);
}

int copy(void* to, const void* from, size_t bytes, DeviceStream stream) {
  if (const int error = check_stream("copy", stream)) return error;
  if (bytes == 0) return kSuccess;
  if (to == nullptr || from == nullptr) return refuse(kInvalidValue, "copy: a null pointer");
  count_call("copy");
  enqueue(stream, [=] {
    if (may_touch(to, bytes, "a copy") && may_touch(from, bytes, "a copy")) {
      memmove(to, from, bytes);
    }
  });
  return kSuccess;
}

int create_stream(DeviceStream* stream) {
  if (const int error = begin_call("create_stream")) return error;
  *stream = make_stream(current_device());
  count_call("create_stream");
  return kSuccess;
}

int destroy_stream(DeviceStream stream) {
  if (const int error = begin_call("destroy_stream")) return error;
  if (stream == nullptr || !is_stream(stream)) {
    return refuse(kInvalidHandle, "destroy_stream: no such stream");
  }
  close_stream(stream);
  count_call("destroy_stream");
  return kSuccess;
}

int create_event(DeviceEvent* event) {
  if (const int error = begin_call("create_event")) return error;
  const auto made = std::make_shared<Event>();
  *event = made.get();
  count_call("create_event");
  const std::lock_guard<std::mutex> locked(objects().mutex);
  objects().events[made.get()] = made;
  return kSuccess;
}

int destroy_event(DeviceEvent event) {
  if (const int error = begin_call("destroy_event")) return error;
  const std::lock_guard<std::mutex> locked(objects().mutex);
  if (objects().events.erase(event) == 1) {
    count_call("destroy_event");
    return kSuccess;
  }
  return refuse(kInvalidHandle, "destroy_event: no such event");
}

int record_event(DeviceEvent event, DeviceStream stream) {
  if (const int error = check_stream("record_event", stream)) return error;
  const auto found = find_event(event);
  if (found == nullptr) return refuse(kInvalidHandle, "record_event: no such event");
  count_call("record_event");
  found->record(stream, found);
  return kSuccess;
}

int query_event(DeviceEvent event, bool* is_complete) {
  if (const int error = begin_call("query_event")) return error;
  if (capture_forbids()) return refuse(kCaptureUnsupported, "query_event: in a capture");
  const auto found = find_event(event);
  if (found == nullptr) return refuse(kInvalidHandle, "query_event: no such event");
  count_call("query_event");
  return found->query(is_complete);
}

int wait_event(DeviceStream stream, DeviceEvent event) {
  if (const int error = check_stream("wait_event", stream)) return error;
  const auto found = find_event(event);
  if (found == nullptr) return refuse(kInvalidHandle, "wait_event: no such event");
  count_call("wait_event");
  return found->hold(stream, found);
}

int capture_id(DeviceStream stream, uint64_t* id) {
  if (const int error = begin_call("capture_id")) return error;
  if (!is_stream(stream)) return refuse(kInvalidHandle, "capture_id: no such stream");
  const auto graph = graph_of(stream);
  *id = graph == nullptr ? 0 : graph->id;
  return kSuccess;
}

int exchange_capture_mode(int* mode) {
  std::swap(capture_mode, *mode);
  return kSuccess;
}

// Small, so that tests cover tables in memory and tables passed with the launch.
uint32_t most_inline_bytes() {
  return 1536;
}

// A launch, and its tables at addresses that the host can read.
struct Launch {
  const CombineArguments& arguments;
  const CombineJob* jobs;
  const CombineView* views;

  bool has_tables() const {
    return arguments.inline_bytes > 0 || device_of(MemoryKind::kDevice, jobs) >= 0;
  }

  // Whether the launch writes nothing unless the world has failed.
  bool only_looks() const {
    return std::all_of(jobs, jobs + arguments.job_count, [](const CombineJob& job) {
      return job.summands == CombineJob::kAlreadyThere;
    });
  }

  // Bytes that the jobs read and write.
  size_t bytes() const {
    return bytes_of([](const CombineJob&) { return true; });
  }

  // Bytes of jobs that copy cells of the input, and add others to them, into a tensor.
  size_t copied_bytes() const {
    const auto is = [&](const CombineView& view, Buffer buffer) { return view.buffer == buffer; };
    return bytes_of([&](const CombineJob& job) {
      const CombineView* const first = views + job.first_view;
      return is(*first, Buffer::kOutput) &&
             std::any_of(first + 1, first + 1 + std::max<int>(0, job.summands),
                         [&](const auto& view) { return is(view, Buffer::kInput); });
    });
  }

  template <typename Counts>
  size_t bytes_of(const Counts& counts) const {
    return std::accumulate(jobs, jobs + arguments.job_count, size_t{0},
                           [&](size_t sum, const CombineJob& job) {
                             if (job.summands == CombineJob::kAlreadyThere || !counts(job)) {
                               return sum;
                             }
                             const size_t lines = job.tiles / job.columns.value / job.line.value;
                             return sum + lines * job.line_bytes * (1 + job.summands);
                           });
  }

  bool may_run() const {
    if (!may_touch(arguments.failed, sizeof(*arguments.failed), "a kernel")) return false;
    return std::all_of(jobs, jobs + arguments.job_count, [&](const CombineJob& job) {
      const CombineView* const first = views + job.first_view;
      return std::all_of(first, first + 1 + std::max<int>(0, job.summands), [&](const auto& view) {
        return may_touch(arguments.buffers[static_cast<int>(view.buffer)] + view.offset, 1,
                         "a kernel");
      });
    });
  }

  void run() const {
    for (uint32_t block = 0; block < arguments.blocks; ++block) {
      for (uint32_t thread = 0; thread < CombineArguments::kThreads; ++thread) {
        combine(arguments, jobs, views, block, thread);
      }
    }
  }
};

int launch_combine(const CombineArguments& arguments, DeviceStream stream) {
  if (const int error = check_stream("launch_combine", stream)) return error;
  const auto* const begin = reinterpret_cast<const char*>(arguments.jobs);
  const size_t views_offset = reinterpret_cast<const char*>(arguments.views) - begin;
  // The tables are passed with the launch.
  const auto tables = std::make_shared<std::vector<char>>(begin, begin + arguments.inline_bytes);
  count_call("launch_combine");
  const Launch now{arguments, arguments.jobs, arguments.views};
  if (now.has_tables() && now.only_looks()) {
    count_call("launch_that_only_looks");
    if (arguments.blocks > 1) count_call("wide_launch_that_only_looks");
  }
  if (now.has_tables()) {
    count_call("kernel_bytes", now.bytes());
    count_call("copied_bytes", now.copied_bytes());
  }
  enqueue(stream, [arguments, tables, views_offset] {
    Launch launch{arguments, arguments.jobs, arguments.views};
    if (!tables->empty()) {
      launch.jobs = reinterpret_cast<const CombineJob*>(tables->data());
      launch.views = reinterpret_cast<const CombineView*>(tables->data() + views_offset);
    } else if (!may_touch(launch.jobs, 1, "a kernel's table")) {
      return;
    }
    if (launch.may_run()) launch.run();
  });
  return kSuccess;
}

size_t bytes_of_item(Dtype dtype) {
  return is_narrow(dtype) ? 2 : dtype == Dtype::kFloat64 ? 8 : 4;
}

int launch_random(const RandomArguments& arguments, DeviceStream stream) {
  if (const int error = check_stream("launch_random", stream)) return error;
  count_call("launch_random");
  const size_t item = arguments.draw == Draw::kKept ? 1 : bytes_of_item(arguments.dtype);
  count_call("kernel_bytes", arguments.cells * item * (arguments.input == nullptr ? 1 : 2));
  enqueue(stream, [arguments] {
    if (!may_touch(arguments.output, 1, "a kernel")) return;
    randomly::with_types(arguments.draw, arguments.dtype, [&](auto draw, auto cells) {
      for (uint32_t block = 0; block < arguments.blocks; ++block) {
        for (uint32_t thread = 0; thread < RandomArguments::kThreads; ++thread) {
          randomly::draw_cells<decltype(draw)::value, decltype(cells)>(arguments, block, thread);
        }
      }
    });
  });
  return kSuccess;
}

// Few, so that small blocks are divided among several blocks of threads.
int multiprocessors(int, int* number) {
  *number = 2;
  return kSuccess;
}

// Bytes of the block that a pass reads and writes, once each.
size_t bytes_of(const NormCall& call) {
  const NormArguments& given = call.arguments;
  const size_t of_x = bytes_of_item(given.dtype), of_y = bytes_of_item(given.result_dtype);
  const auto of_cell = [&]() -> size_t {
    switch (call.pass) {
      case NormPass::kSums: return of_x;
      case NormPass::kNormalize:
      case NormPass::kGradientSums: return of_x + of_y;
      case NormPass::kGradient: return 2 * of_x + of_y;
      default: return 0;
    }
  }();
  return of_cell * given.outer * given.channels * given.cells;
}

int launch_norm(const NormCall& call, DeviceStream stream) {
  if (norm_blocks(call) == 0) return kSuccess;
  if (const int error = check_stream("launch_norm", stream)) return error;
  count_call("launch_norm");
  count_call("kernel_bytes", bytes_of(call));
  enqueue(stream, [call] {
    const uint32_t* const failed = call.arguments.failed;
    if (!may_touch(failed, sizeof(*failed), "a kernel")) return;
    if (may_touch(call.arguments.x, 1, "a kernel")) run_norm(call);
  });
  return kSuccess;
}

constexpr DeviceApi kApi{DeviceApi::kAbi,
                         "double",
                         error_string,
                         version,
                         version,
                         count_devices,
                         context_of,
                         get_context,
                         set_context,
                         capability,
                         multiprocessors,
                         check_kernels,
                         allocate,
                         release,
                         allocate_pinned,
                         release_pinned,
                         copy,
                         create_stream,
                         destroy_stream,
                         create_event,
                         destroy_event,
                         record_event,
                         query_event,
                         wait_event,
                         capture_id,
                         exchange_capture_mode,
                         most_inline_bytes,
                         launch_combine,
                         launch_random,
                         launch_norm};

}  // namespace

}  // namespace doubles

}  // namespace gpudist

GPUDIST_EXPORT const gpudist::DeviceApi* gpudist_device_api() {
  return &gpudist::doubles::kApi;
}
