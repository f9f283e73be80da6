// What one thread of the kernel does: a few lanes of one job, all of them read before any is
// written. Included by combine.h.
#pragma once

#include <cstring>

#include "combine.h"

// Unrolled, some loops take more registers than there are for half of a multiprocessor's threads.
#ifdef __CUDA_ARCH__
#define GPUDIST_NOT_UNROLLED _Pragma("unroll 1")
#else
#define GPUDIST_NOT_UNROLLED
#endif

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
  const CombineView* all_views;
  uint32_t first_lane;

  GPUDIST_HOST_DEVICE uint32_t lane(int i) const {
    return first_lane + static_cast<uint32_t>(i) * CombineArguments::kThreads;
  }
  GPUDIST_HOST_DEVICE bool has(int i) const { return lane(i) < job.lanes; }
  GPUDIST_HOST_DEVICE const CombineView* views() const { return all_views + job.first_view; }

  template <class Word>
  GPUDIST_HOST_DEVICE Word* at(const CombineView& view, int64_t offset) const {
    return reinterpret_cast<Word*>(arguments.buffers[static_cast<int>(view.buffer)] + offset);
  }
};

// Where `kCount` of the lanes, from number `first` on, are in `kViews` consecutive views.
template <class Word, int kViews, int kCount>
GPUDIST_HOST_DEVICE inline void locate(const Thread& thread, int first, const CombineView* views,
                                       int64_t (&offsets)[kViews][kCount]) {
  const CombineJob& job = thread.job;
  const Divisor row_lanes = job.row_lanes;
  uint32_t row[kCount];
  for (int i = 0; i < kCount; ++i) {
    const uint32_t lane = thread.lane(first + i);
    row[i] = row_lanes.quotient(lane);
    const int64_t column = lane - row[i] * row_lanes.value;
    for (int v = 0; v < kViews; ++v) {
      offsets[v][i] = views[v].offset + column * static_cast<int64_t>(sizeof(Word));
    }
  }
  GPUDIST_NOT_UNROLLED
  for (int d = job.dims - 1; d >= 0; --d) {
    const Divisor extent = job.shape[d];
    for (int i = 0; i < kCount; ++i) {
      const uint32_t outer = extent.quotient(row[i]);
      const int64_t index = row[i] - outer * extent.value;
      row[i] = outer;
      for (int v = 0; v < kViews; ++v) offsets[v][i] += index * views[v].stride[d];
    }
  }
}

template <class Word, int kCount>
GPUDIST_HOST_DEVICE inline void load(const Thread& thread, int first, const CombineView& view,
                                     const int64_t (&offsets)[kCount], Word (&words)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    words[i] = thread.has(first + i) ? *thread.at<Word>(view, offsets[i]) : Word{};
  }
}

template <class Word, int kCount>
GPUDIST_HOST_DEVICE inline void store(const Thread& thread, int first,
                                      const int64_t (&offsets)[kCount],
                                      const Word (&words)[kCount]) {
  for (int i = 0; i < kCount; ++i) {
    if (thread.has(first + i)) *thread.at<Word>(thread.views()[0], offsets[i]) = words[i];
  }
}

template <class Word>
GPUDIST_HOST_DEVICE inline void set_all_ones(const Thread& thread) {
  int64_t offsets[1][kLanes];
  locate<Word>(thread, 0, thread.views(), offsets);
  Word words[kLanes];
  memset(words, 0xff, sizeof(words));
  store(thread, 0, offsets[0], words);
}

template <class Word>
GPUDIST_HOST_DEVICE inline void set_constant(const Thread& thread) {
  int64_t offsets[1][kLanes];
  locate<Word>(thread, 0, thread.views(), offsets);
  Word words[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    // A lane may be a part of an item. Rows begin with whole ones.
    const uint32_t in_item = thread.lane(i) % thread.job.row_lanes.value *
                             static_cast<uint32_t>(sizeof(Word)) % thread.arguments.item_bytes;
    memcpy(&words[i], thread.arguments.fill + in_item, sizeof(Word));
  }
  store(thread, 0, offsets[0], words);
}

template <class Word>
GPUDIST_HOST_DEVICE inline void copy(const Thread& thread) {
  int64_t offsets[2][kLanes];
  locate<Word>(thread, 0, thread.views(), offsets);
  Word words[kLanes];
  load(thread, 0, thread.views()[1], offsets[1], words);
  store(thread, 0, offsets[0], words);
}

// The sum of words, item by item.
template <class T, class Word>
struct PlainSum {
  T items[sizeof(Word) / sizeof(T)];

  GPUDIST_HOST_DEVICE void start(Word word) { memcpy(items, &word, sizeof(Word)); }
  GPUDIST_HOST_DEVICE void add(Word word) {
    PlainSum other;
    other.start(word);
    for (size_t k = 0; k < sizeof(Word) / sizeof(T); ++k) items[k] += other.items[k];
  }
  GPUDIST_HOST_DEVICE Word result() const {
    Word word;
    memcpy(&word, items, sizeof(Word));
    return word;
  }
};

// Integers of 8 or 16 bits, several in one register: their top bits take no carry to the next.
template <class T>
struct PackedSum {
  static constexpr uint64_t kTopBits = ~uint64_t{0} / T(~T{0}) << (8 * sizeof(T) - 1);
  Word16 sum;

  GPUDIST_HOST_DEVICE static uint64_t added(uint64_t a, uint64_t b) {
    return ((a & ~kTopBits) + (b & ~kTopBits)) ^ ((a ^ b) & kTopBits);
  }
  GPUDIST_HOST_DEVICE void start(Word16 word) { sum = word; }
  GPUDIST_HOST_DEVICE void add(Word16 word) {
    sum = {added(sum.low, word.low), added(sum.high, word.high)};
  }
  GPUDIST_HOST_DEVICE Word16 result() const { return sum; }
};

template <>
struct PlainSum<uint8_t, Word16> : PackedSum<uint8_t> {};
template <>
struct PlainSum<uint16_t, Word16> : PackedSum<uint16_t> {};

// 16-bit floats, in float32.
template <float (*kWiden)(uint16_t), uint16_t (*kNarrow)(float), class Word>
struct WideSum {
  static constexpr int kItems = sizeof(Word) / sizeof(uint16_t);
  float items[kItems];

  GPUDIST_HOST_DEVICE void start(Word word) {
    uint16_t halves[kItems];
    memcpy(halves, &word, sizeof(Word));
    for (int k = 0; k < kItems; ++k) items[k] = kWiden(halves[k]);
  }
  GPUDIST_HOST_DEVICE void add(Word word) {
    WideSum other;
    other.start(word);
    for (int k = 0; k < kItems; ++k) items[k] += other.items[k];
  }
  GPUDIST_HOST_DEVICE Word result() const {
    uint16_t halves[kItems];
    for (int k = 0; k < kItems; ++k) halves[k] = kNarrow(items[k]);
    Word word;
    memcpy(&word, halves, sizeof(Word));
    return word;
  }
};

// How the items of a dtype are summed.
template <class T>
struct Plain {
  using Item = T;
  template <class Word>
  using Sum = PlainSum<T, Word>;
};

struct Float16 {
  using Item = uint16_t;
  template <class Word>
  using Sum = WideSum<float16_to_float, float_to_float16, Word>;
};

struct Bfloat16 {
  using Item = uint16_t;
  template <class Word>
  using Sum = WideSum<bfloat16_to_float, float_to_bfloat16, Word>;
};

// `kCount` lanes, from number `first` on.
template <class Sum, class Word, int kCount>
GPUDIST_HOST_DEVICE inline void sum_some(const Thread& thread, int first) {
  const CombineView* const views = thread.views();
  Sum sums[kCount];
  for (int v = 1; v <= thread.job.summands; ++v) {
    int64_t offsets[1][kCount];
    locate<Word>(thread, first, views + v, offsets);
    Word words[kCount];
    load(thread, first, views[v], offsets[0], words);
    for (int i = 0; i < kCount; ++i) {
      if (v == 1) {
        sums[i].start(words[i]);
      } else {
        sums[i].add(words[i]);
      }
    }
  }
  int64_t offsets[1][kCount];
  locate<Word>(thread, first, views, offsets);
  Word words[kCount];
  for (int i = 0; i < kCount; ++i) words[i] = sums[i].result();
  store(thread, first, offsets[0], words);
}

// Wide lanes two at a time: the sums of more would not fit the registers.
template <class Type>
GPUDIST_HOST_DEVICE inline void sum(const Thread& thread) {
  using Item = typename Type::Item;
  if (thread.job.lane_bytes != sizeof(Word16)) {
    return sum_some<typename Type::template Sum<Item>, Item, kLanes>(thread, 0);
  }
  GPUDIST_NOT_UNROLLED
  for (int first = 0; first < kLanes; first += 2) {
    sum_some<typename Type::template Sum<Word16>, Word16, 2>(thread, first);
  }
}

// Integer sums wrap, which C++ says of the unsigned ones only.
GPUDIST_HOST_DEVICE inline void sum_of(const Thread& thread) {
  switch (thread.arguments.dtype) {
    case Dtype::kUint8:
    case Dtype::kInt8: return sum<Plain<uint8_t>>(thread);
    case Dtype::kInt16: return sum<Plain<uint16_t>>(thread);
    case Dtype::kInt32: return sum<Plain<uint32_t>>(thread);
    case Dtype::kInt64: return sum<Plain<uint64_t>>(thread);
    case Dtype::kFloat16: return sum<Float16>(thread);
    case Dtype::kBfloat16: return sum<Bfloat16>(thread);
    case Dtype::kFloat32: return sum<Plain<float>>(thread);
    case Dtype::kFloat64: return sum<Plain<double>>(thread);
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
GPUDIST_HOST_DEVICE inline uint32_t job_of(const CombineJob* jobs, uint32_t job_count,
                                           uint32_t block) {
  uint32_t first = 0, stop = job_count;
  while (stop - first > 1) {
    const uint32_t middle = first + (stop - first) / 2;
    if (jobs[middle].first_block <= block) {
      first = middle;
    } else {
      stop = middle;
    }
  }
  return first;
}

}  // namespace combining

GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, const CombineJob* jobs,
                                        const CombineView* views, uint32_t block, uint32_t thread) {
  const CombineJob& job = jobs[combining::job_of(jobs, arguments.job_count, block)];
  const uint32_t before = (block - job.first_block) * CombineArguments::kLanesPerBlock;
  const combining::Thread lanes{arguments, job, views, before + thread};
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
