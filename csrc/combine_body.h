// What one thread of the kernel does: tiles of one job. Included by combine.h.
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

constexpr uint32_t kAllBytes = 0xffff;
constexpr uint32_t kOnes = ~uint32_t{0};

// 16 bytes that lie at a multiple of 16. Bits of a number tell which of them are meant, the lowest
// of the first.
struct alignas(CombineTile::kGranule) Granule {
  static constexpr int kWords = 4;
  uint32_t words[kWords];
};

template <class Word>
GPUDIST_HOST_DEVICE inline Word& at(char* address) {
  return *reinterpret_cast<Word*>(address);
}
template <class Word>
GPUDIST_HOST_DEVICE inline Word at(const char* address) {
  return *reinterpret_cast<const Word*>(address);
}

GPUDIST_HOST_DEVICE inline void store_word(char* to, uint32_t bits, uint32_t word) {
  if (bits == 0) return;
  if (bits == 0xf) {
    at<uint32_t>(to) = word;
    return;
  }
  for (int h = 0; h < 4; h += 2) {
    const uint32_t half = bits >> h & 3;
    if (half == 3) at<uint16_t>(to + h) = static_cast<uint16_t>(word >> (8 * h));
    if (half == 1) at<uint8_t>(to + h) = static_cast<uint8_t>(word >> (8 * h));
    if (half == 2) at<uint8_t>(to + h + 1) = static_cast<uint8_t>(word >> (8 * h + 8));
  }
}

GPUDIST_HOST_DEVICE inline void store(char* to, uint32_t bits, const Granule& granule) {
  if (bits == kAllBytes) {
    at<Granule>(to) = granule;
    return;
  }
  for (int w = 0; w < Granule::kWords; ++w) {
    store_word(to + 4 * w, bits >> (4 * w) & 0xf, granule.words[w]);
  }
}

// The lower word of two, after a shift to the right by `bits` modulo 32.
GPUDIST_HOST_DEVICE inline uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (bits % 32));
#endif
}

// Bytes `shift` to `shift` + 15 of two granules.
GPUDIST_HOST_DEVICE inline Granule shifted(const Granule& low, const Granule& high,
                                           uint32_t shift) {
  uint32_t words[2 * Granule::kWords];
  for (int w = 0; w < 4; ++w) words[w] = low.words[w], words[4 + w] = high.words[w];
  for (int w = 0; w < 6; ++w) words[w] = shift & 8 ? words[w + 2] : words[w];
  for (int w = 0; w < 5; ++w) words[w] = shift & 4 ? words[w + 1] : words[w];
  Granule result;
  for (int w = 0; w < 4; ++w) result.words[w] = funnel_shift(words[w], words[w + 1], 8 * shift);
  return result;
}

// Which tile of a job a thread has.
struct Tile {
  int32_t column;  // of a row, where the row begins with a granule
  uint32_t in_line;
  uint32_t line;

  GPUDIST_HOST_DEVICE Tile(const CombineJob& job, uint32_t number) {
    const uint32_t row = job.columns.quotient(number);
    column = static_cast<int32_t>(number - row * job.columns.value) * CombineTile::kGranule;
    line = job.line.quotient(row);
    in_line = row - line * job.line.value;
  }
};

struct Thread {
  const CombineArguments& arguments;
  const CombineJob& job;
  const CombineView* views;  // the job's
  bool is_worthless;         // what is made: all-ones bytes, whatever the summands

  GPUDIST_HOST_DEVICE int summands() const { return is_worthless ? 0 : job.summands; }
  // The constant, as it lies `skew` bytes before a row begins or later.
  GPUDIST_HOST_DEVICE Granule fill(uint32_t skew) const {
    if (is_worthless) return {{kOnes, kOnes, kOnes, kOnes}};
    const Granule items = at<Granule>(reinterpret_cast<const char*>(arguments.fill));
    return shifted(items, items, -skew % 16);
  }
};

// Goes along a view from one row of a tile to the next.
struct Cursor {
  char* at;  // the tile's column
  int64_t step;
  bool may_read_granules;  // all that have bytes of the tile's rows

  GPUDIST_HOST_DEVICE Cursor(const Thread& thread, const CombineView& view, const Tile& tile) {
    int64_t offset = view.offset + tile.column + tile.in_line * view.tile_stride;
    uint32_t line = tile.line;
    GPUDIST_NOT_UNROLLED
    for (int d = thread.job.dims - 1; d >= 0; --d) {
      const Divisor shape = thread.job.shape[d];
      const uint32_t outer = shape.quotient(line);
      offset += (line - outer * shape.value) * view.stride[d];
      line = outer;
    }
    at = thread.arguments.buffers[static_cast<int>(view.buffer)] + offset;
    step = view.step;
    // A piece begins up to 15 bytes before its column, and its first granule as many before it.
    may_read_granules = offset - 30 >= view.offset && offset + view.reach <= view.stop;
  }
};

// A granule of the destination, as a part of one row.
struct Piece {
  uint32_t skew;  // by which it begins before the tile's column
  uint32_t bits;  // of the bytes that are the row's

  Piece() = default;
  // `left`: bytes from the column to where the row ends.
  GPUDIST_HOST_DEVICE Piece(const char* at, const Tile& tile, int32_t left) {
    skew = reinterpret_cast<uintptr_t>(at) % 16;
    const int32_t start = tile.column == 0 ? static_cast<int32_t>(skew) : 0;
    int32_t stop = left + static_cast<int32_t>(skew);
    stop = stop > 16 ? 16 : stop < start ? start : stop;
    bits = (1u << stop) - (1u << start);
  }
};

// Load the bytes that are meant and no others.
GPUDIST_HOST_DEVICE inline Granule load(const char* from, uint32_t bits) {
  Granule granule{};
#ifdef __CUDA_ARCH__
#pragma unroll 4
#endif
  for (int k = 15; k >= 0; --k) {
    const uint32_t byte = bits >> k & 1 ? at<uint8_t>(from + k) : 0;
    for (int w = 3; w > 0; --w) {
      granule.words[w] = funnel_shift(granule.words[w - 1], granule.words[w], 24);
    }
    granule.words[0] = granule.words[0] << 8 | byte;
  }
  return granule;
}

// A summand's bytes for pieces.
template <int kCount>
GPUDIST_HOST_DEVICE inline void gather(Cursor& cursor, const Piece (&pieces)[kCount],
                                       Granule (&granules)[kCount]) {
  if (!cursor.may_read_granules) {
    for (int i = 0; i < kCount; ++i) {
      granules[i] = load(cursor.at - pieces[i].skew, pieces[i].bits);
      cursor.at += cursor.step;
    }
    return;
  }
  Granule low[kCount], high[kCount];
  uint32_t shift[kCount];
  for (int i = 0; i < kCount; ++i) {
    const char* from = cursor.at - pieces[i].skew;
    shift[i] = reinterpret_cast<uintptr_t>(from) % 16;
    from -= shift[i];
    const uint32_t bits = pieces[i].bits << shift[i];
    const bool has_low = (bits & kAllBytes) != 0, has_high = bits > kAllBytes;
    low[i] = at<Granule>(from + (has_low ? 0 : 16));
    high[i] = at<Granule>(from + (has_high ? 16 : 0));
    cursor.at += cursor.step;
  }
  for (int i = 0; i < kCount; ++i) granules[i] = shifted(low[i], high[i], shift[i]);
}

// One summand alone, of whatever type.
struct Same {
  Granule granule;

  GPUDIST_HOST_DEVICE void start(const Granule& other) { granule = other; }
  GPUDIST_HOST_DEVICE void add(const Granule&) {}
  GPUDIST_HOST_DEVICE Granule result() const { return granule; }
};

// The sum of granules, item by item.
template <class T>
struct PlainSum {
  static constexpr int kItems = sizeof(Granule) / sizeof(T);
  T items[kItems];

  GPUDIST_HOST_DEVICE void start(const Granule& granule) {
    memcpy(items, &granule, sizeof(Granule));
  }
  GPUDIST_HOST_DEVICE void add(const Granule& granule) {
    PlainSum other;
    other.start(granule);
    for (int k = 0; k < kItems; ++k) items[k] += other.items[k];
  }
  GPUDIST_HOST_DEVICE Granule result() const {
    Granule granule;
    memcpy(&granule, items, sizeof(Granule));
    return granule;
  }
};

// Integers of 8 or 16 bits, several in one register: their top bits take no carry to the next.
template <class T>
struct PackedSum : Same {
  static constexpr uint32_t kTopBits = ~uint32_t{0} / T(~T{0}) << (8 * sizeof(T) - 1);

  GPUDIST_HOST_DEVICE void add(const Granule& other) {
    for (int w = 0; w < Granule::kWords; ++w) {
      const uint32_t a = granule.words[w], b = other.words[w];
      granule.words[w] = ((a & ~kTopBits) + (b & ~kTopBits)) ^ ((a ^ b) & kTopBits);
    }
  }
};

// 16-bit floats, in float32.
template <class Pair>
struct WideSum {
  float items[Granule::kWords][2];

  GPUDIST_HOST_DEVICE void start(const Granule& granule) {
    for (int w = 0; w < Granule::kWords; ++w) Pair::widen(granule.words[w], items[w]);
  }
  GPUDIST_HOST_DEVICE void add(const Granule& granule) {
    for (int w = 0; w < Granule::kWords; ++w) {
      float other[2];
      Pair::widen(granule.words[w], other);
      for (int k = 0; k < 2; ++k) items[w][k] += other[k];
    }
  }
  GPUDIST_HOST_DEVICE Granule result() const {
    Granule granule;
    for (int w = 0; w < Granule::kWords; ++w) granule.words[w] = Pair::narrow(items[w]);
    return granule;
  }
};

// One tile, `kCount` rows at a time: all of them read before any is written. The first `kHeld`
// summands are found once a tile, others once for as many rows.
template <class Sum, int kHeld, int kCount>
GPUDIST_HOST_DEVICE inline void make_tile(const Thread& thread, uint32_t number) {
  const CombineJob& job = thread.job;
  const Tile tile(job, number);
  Cursor to(thread, thread.views[0], tile);
  Cursor first(thread, thread.views[thread.summands() > 0 ? 1 : 0], tile);
  Cursor second(thread, thread.views[kHeld > 1 ? 2 : 0], tile);
  const int32_t of_row = job.row_bytes - tile.column;
  int32_t of_line =
      job.line_bytes - tile.column - static_cast<int32_t>(tile.in_line) * job.tile_bytes;
  GPUDIST_NOT_UNROLLED
  for (int row = 0; row < job.rows; row += kCount) {
    Piece pieces[kCount];
    for (int i = 0; i < kCount; ++i) {
      pieces[i] = Piece(to.at + i * to.step, tile, of_row < of_line ? of_row : of_line);
      of_line -= job.step_bytes;
    }
    Granule granules[kCount];
    Sum sums[kCount];
    if (thread.summands() > 0) {
      gather(first, pieces, granules);
      for (int i = 0; i < kCount; ++i) sums[i].start(granules[i]);
    } else {
      for (int i = 0; i < kCount; ++i) sums[i].start(thread.fill(pieces[i].skew));
    }
    if (kHeld > 1) {
      gather(second, pieces, granules);
      for (int i = 0; i < kCount; ++i) sums[i].add(granules[i]);
      GPUDIST_NOT_UNROLLED
      for (int v = 3; v <= thread.summands(); ++v) {
        Cursor other(thread, thread.views[v], tile);
        other.at += row * other.step;
        gather(other, pieces, granules);
        for (int i = 0; i < kCount; ++i) sums[i].add(granules[i]);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      store(to.at - pieces[i].skew, pieces[i].bits, sums[i].result());
      to.at += to.step;
    }
  }
}

template <class Sum, int kHeld, int kCount>
GPUDIST_HOST_DEVICE inline void make_tiles(const Thread& thread, uint32_t first) {
  constexpr uint32_t kThreads = CombineArguments::kThreads;
  GPUDIST_NOT_UNROLLED
  for (uint32_t number = first; number < thread.job.tiles; number += thread.job.blocks * kThreads) {
    make_tile<Sum, kHeld, kCount>(thread, number);
  }
}

// Wide lanes two at a time: the sums of more would not fit the registers.
template <class Sum>
GPUDIST_HOST_DEVICE inline void sum(const Thread& thread, uint32_t first) {
  make_tiles<Sum, 2, 2>(thread, first);
}

// Integer sums wrap, which C++ says of the unsigned ones only.
GPUDIST_HOST_DEVICE inline void make(const Thread& thread, uint32_t first) {
  if (thread.summands() <= 1) return make_tiles<Same, 1, 2>(thread, first);
  switch (thread.arguments.dtype) {
    case Dtype::kUint8:
    case Dtype::kInt8: return sum<PackedSum<uint8_t>>(thread, first);
    case Dtype::kInt16: return sum<PackedSum<uint16_t>>(thread, first);
    case Dtype::kInt32: return sum<PlainSum<uint32_t>>(thread, first);
    case Dtype::kInt64: return sum<PlainSum<uint64_t>>(thread, first);
    case Dtype::kFloat16: return sum<WideSum<Float16Pair>>(thread, first);
    case Dtype::kBfloat16: return sum<WideSum<Bfloat16Pair>>(thread, first);
    case Dtype::kFloat32: return sum<PlainSum<float>>(thread, first);
    case Dtype::kFloat64: return sum<PlainSum<double>>(thread, first);
    default: return;  // refused when the plan was made
  }
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

// To read it in memory of the host takes about a microsecond, which threads of a multiprocessor
// share: its cache is empty when a launch begins, and what was set before is seen.
GPUDIST_HOST_DEVICE inline bool is_set(const uint32_t* word) {
  if (word == nullptr) return false;
#ifdef __CUDA_ARCH__
  return *word != 0;
#else
  return __atomic_load_n(word, __ATOMIC_RELAXED) != 0;
#endif
}

}  // namespace combining

GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, const CombineJob* jobs,
                                        const CombineView* views, uint32_t block, uint32_t thread) {
  using namespace combining;
  const CombineJob& job = jobs[job_of(jobs, arguments.job_count, block)];
  const CombineView* const job_views = views + job.first_view;
  const uint32_t first = (block - job.first_block) * CombineArguments::kThreads + thread;
  const bool failed = is_set(arguments.failed);
  if (job.summands != CombineJob::kAlreadyThere) {
    make({arguments, job, job_views, false}, first);
  }
  if (failed) make_tiles<Same, 1, 1>({arguments, job, job_views, true}, first);
}

}  // namespace gpudist
