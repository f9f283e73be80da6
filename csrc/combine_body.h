// What one thread of the kernel does: a few lanes of one job, all of them read before any is
// written. Included by combine.h.
#pragma once

#include "combine.h"

namespace gpudist {
namespace combining {

constexpr int kLanes = CombineArguments::kLanesPerThread;

struct alignas(16) Word16 {
  uint64_t low, high;
};

// The lanes of one thread. Consecutive threads have consecutive ones.
struct Thread {
  const CombineArguments& arguments;
  const CombineJob& job;
  uint32_t first_lane;

  GPUDIST_HOST_DEVICE uint32_t lane(int i) const {
    return first_lane + static_cast<uint32_t>(i) * CombineArguments::kThreads;
  }
  GPUDIST_HOST_DEVICE bool has(int i) const { return lane(i) < job.lanes; }
  GPUDIST_HOST_DEVICE const CombineView* views() const { return arguments.views + job.first_view; }

  template <class Word>
  GPUDIST_HOST_DEVICE Word* at(const CombineView& view, int64_t offset) const {
    return reinterpret_cast<Word*>(arguments.buffers[static_cast<int>(view.buffer)] + offset);
  }
};

// Where the lanes are in `kViews` consecutive views.
template <class Word, int kViews>
GPUDIST_HOST_DEVICE inline void locate(const Thread& thread, const CombineView* views,
                                       int64_t (&offsets)[kViews][kLanes]) {
  const CombineJob& job = thread.job;
  const Divisor row_lanes = job.row_lanes;
  uint32_t row[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    row[i] = row_lanes.quotient(thread.lane(i));
    const int64_t column = thread.lane(i) - row[i] * row_lanes.value;
    for (int v = 0; v < kViews; ++v) {
      offsets[v][i] = views[v].offset + column * static_cast<int64_t>(sizeof(Word));
    }
  }
  for (int d = job.dims - 1; d >= 0; --d) {
    const Divisor extent = job.shape[d];
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t outer = extent.quotient(row[i]);
      const int64_t index = row[i] - outer * extent.value;
      row[i] = outer;
      for (int v = 0; v < kViews; ++v) offsets[v][i] += index * views[v].stride[d];
    }
  }
}

template <class Word>
GPUDIST_HOST_DEVICE inline void store(const Thread& thread, const int64_t (&offsets)[kLanes],
                                      const Word (&words)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    if (thread.has(i)) *thread.at<Word>(thread.views()[0], offsets[i]) = words[i];
  }
}

template <class Word>
GPUDIST_HOST_DEVICE inline void set_all_ones(const Thread& thread) {
  int64_t offsets[1][kLanes];
  locate<Word>(thread, thread.views(), offsets);
  Word words[kLanes];
  memset(words, 0xff, sizeof(words));
  store(thread, offsets[0], words);
}

template <class Word>
GPUDIST_HOST_DEVICE inline void set_constant(const Thread& thread) {
  int64_t offsets[1][kLanes];
  locate<Word>(thread, thread.views(), offsets);
  Word words[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    // A lane may be a part of an item. Rows begin with whole ones.
    const uint32_t in_item = thread.lane(i) % thread.job.row_lanes.value *
                             static_cast<uint32_t>(sizeof(Word)) % thread.arguments.item_bytes;
    memcpy(&words[i], thread.arguments.fill + in_item, sizeof(Word));
  }
  store(thread, offsets[0], words);
}

template <class Word>
GPUDIST_HOST_DEVICE inline void copy(const Thread& thread) {
  int64_t offsets[2][kLanes];
  locate<Word>(thread, thread.views(), offsets);
  Word words[kLanes] = {};
  for (int i = 0; i < kLanes; ++i) {
    if (thread.has(i)) words[i] = *thread.at<Word>(thread.views()[1], offsets[1][i]);
  }
  store(thread, offsets[0], words);
}

// Items that are summed as they are.
template <class T>
struct Plain {
  using Item = T;
  using Sum = T;
  GPUDIST_HOST_DEVICE static T widen(T item) { return item; }
  GPUDIST_HOST_DEVICE static T narrow(T sum) { return sum; }
};

struct Float16 {
  using Item = uint16_t;
  using Sum = float;
  GPUDIST_HOST_DEVICE static float widen(uint16_t item) { return float16_to_float(item); }
  GPUDIST_HOST_DEVICE static uint16_t narrow(float sum) { return float_to_float16(sum); }
};

struct Bfloat16 {
  using Item = uint16_t;
  using Sum = float;
  GPUDIST_HOST_DEVICE static float widen(uint16_t item) { return bfloat16_to_float(item); }
  GPUDIST_HOST_DEVICE static uint16_t narrow(float sum) { return float_to_bfloat16(sum); }
};

// Add the lanes of one view to `sums`, or let them be the first.
template <class Type, class Word, int kItems>
GPUDIST_HOST_DEVICE inline void add(const Thread& thread, const CombineView& view, bool is_first,
                                    typename Type::Sum (&sums)[kLanes][kItems]) {
  int64_t offsets[1][kLanes];
  locate<Word>(thread, &view, offsets);
  Word words[kLanes] = {};
  for (int i = 0; i < kLanes; ++i) {
    if (thread.has(i)) words[i] = *thread.at<Word>(view, offsets[0][i]);
  }
  for (int i = 0; i < kLanes; ++i) {
    typename Type::Item items[kItems];
    memcpy(items, &words[i], sizeof(Word));
    for (int k = 0; k < kItems; ++k) {
      const typename Type::Sum item = Type::widen(items[k]);
      sums[i][k] = is_first ? item : static_cast<typename Type::Sum>(sums[i][k] + item);
    }
  }
}

template <class Type, class Word>
GPUDIST_HOST_DEVICE inline void sum(const Thread& thread) {
  constexpr int kItems = sizeof(Word) / sizeof(typename Type::Item);
  const CombineView* const views = thread.views();
  typename Type::Sum sums[kLanes][kItems] = {};
  for (int v = 1; v <= thread.job.summands; ++v) {
    add<Type, Word>(thread, views[v], v == 1, sums);
  }
  Word words[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    typename Type::Item items[kItems];
    for (int k = 0; k < kItems; ++k) items[k] = Type::narrow(sums[i][k]);
    memcpy(&words[i], items, sizeof(Word));
  }
  int64_t offsets[1][kLanes];
  locate<Word>(thread, views, offsets);
  store(thread, offsets[0], words);
}

template <class Type>
GPUDIST_HOST_DEVICE inline void sum_lanes(const Thread& thread) {
  if (thread.job.lane_bytes == sizeof(Word16)) {
    sum<Type, Word16>(thread);
  } else {
    sum<Type, typename Type::Item>(thread);
  }
}

// Integer sums wrap, which C++ says of the unsigned ones only.
GPUDIST_HOST_DEVICE inline void sum_of(const Thread& thread) {
  switch (thread.arguments.dtype) {
    case Dtype::kUint8:
    case Dtype::kInt8: return sum_lanes<Plain<uint8_t>>(thread);
    case Dtype::kInt16: return sum_lanes<Plain<uint16_t>>(thread);
    case Dtype::kInt32: return sum_lanes<Plain<uint32_t>>(thread);
    case Dtype::kInt64: return sum_lanes<Plain<uint64_t>>(thread);
    case Dtype::kFloat16: return sum_lanes<Float16>(thread);
    case Dtype::kBfloat16: return sum_lanes<Bfloat16>(thread);
    case Dtype::kFloat32: return sum_lanes<Plain<float>>(thread);
    case Dtype::kFloat64: return sum_lanes<Plain<double>>(thread);
    default: return;  // refused when the plan was made
  }
}

template <class Word>
GPUDIST_HOST_DEVICE inline void run(const Thread& thread, bool failed) {
  if (failed) return set_all_ones<Word>(thread);
  if (thread.job.summands == 0) return set_constant<Word>(thread);
  if (thread.job.summands == 1) return copy<Word>(thread);
}

// The last job that begins with this block or before it.
GPUDIST_HOST_DEVICE inline uint32_t job_of(const CombineArguments& arguments, uint32_t block) {
  uint32_t first = 0, stop = arguments.job_count;
  while (stop - first > 1) {
    const uint32_t middle = first + (stop - first) / 2;
    if (arguments.jobs[middle].first_block <= block) {
      first = middle;
    } else {
      stop = middle;
    }
  }
  return first;
}

}  // namespace combining

GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, uint32_t block,
                                        uint32_t thread) {
  const CombineJob& job = arguments.jobs[combining::job_of(arguments, block)];
  const uint32_t before = (block - job.first_block) * CombineArguments::kLanesPerBlock;
  const combining::Thread lanes{arguments, job, before + thread};
  const bool failed =
      arguments.failed != nullptr && *static_cast<const volatile uint32_t*>(arguments.failed) != 0;
  if (job.summands > 1 && !failed) return combining::sum_of(lanes);
  switch (job.lane_bytes) {
    case 16: return combining::run<combining::Word16>(lanes, failed);
    case 8: return combining::run<uint64_t>(lanes, failed);
    case 4: return combining::run<uint32_t>(lanes, failed);
    case 2: return combining::run<uint16_t>(lanes, failed);
    default: return combining::run<uint8_t>(lanes, failed);
  }
}

}  // namespace gpudist
