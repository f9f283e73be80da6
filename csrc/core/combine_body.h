// Work of one thread of the combine kernel. Included by combine.h.
#pragma once

#include <type_traits>

#include "core/combine.h"
#include "core/failed_word.h"

namespace gpudist {
namespace combining {

constexpr uint32_t kOnes = ~uint32_t{0};

// 16 bytes at an address divisible by 16. `bits` masks select items of a granule, the lowest bit
// the first item.
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

template <int kItem>
constexpr uint32_t kAllItems = (uint32_t{1} << (16 / kItem)) - 1;

// Store the selected items of a word of which not all are selected.
template <int kItem>
GPUDIST_HOST_DEVICE inline void store_halves(char* to, uint32_t bits, uint32_t word) {
  constexpr uint32_t kInHalf = 2 / kItem, kAll = (1u << kInHalf) - 1;
  for (int h = 0; h < 2; ++h) {
    const uint32_t half = bits >> (h * kInHalf) & kAll;
    if (half == kAll) at<uint16_t>(to + 2 * h) = static_cast<uint16_t>(word >> (16 * h));
    if constexpr (kItem == 1) {
      if (half == 1) at<uint8_t>(to + 2 * h) = static_cast<uint8_t>(word >> (16 * h));
      if (half == 2) at<uint8_t>(to + 2 * h + 1) = static_cast<uint8_t>(word >> (16 * h + 8));
    }
  }
}

template <int kItem>
GPUDIST_HOST_DEVICE inline void store(char* to, uint32_t bits, const Granule& granule) {
  if (bits == kAllItems<kItem>) {
    at<Granule>(to) = granule;
    return;
  }
  for (int w = 0; w < Granule::kWords; ++w) {
    if constexpr (kItem >= 4) {
      if (bits >> (4 * w / kItem) & 1) at<uint32_t>(to + 4 * w) = granule.words[w];
    } else {
      constexpr uint32_t kInWord = 4 / kItem, kAll = (1u << kInWord) - 1;
      const uint32_t meant = bits >> (w * kInWord) & kAll;
      if (meant == kAll) {
        at<uint32_t>(to + 4 * w) = granule.words[w];
      } else if (meant != 0) {
        store_halves<kItem>(to + 4 * w, meant, granule.words[w]);
      }
    }
  }
}

// Lower word of `high:low` shifted right by `bits` modulo 32.
GPUDIST_HOST_DEVICE inline uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __funnelshift_r(low, high, bits);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (bits % 32));
#endif
}

// Bytes `shift` to `shift` + 15 of two consecutive granules; `shift` is a multiple of `kItem`.
template <int kItem>
GPUDIST_HOST_DEVICE inline Granule shifted(const Granule& low, const Granule& high,
                                           uint32_t shift) {
  uint32_t words[2 * Granule::kWords];
  for (int w = 0; w < 4; ++w) words[w] = low.words[w], words[4 + w] = high.words[w];
  for (int w = 0; w < 6; ++w) words[w] = shift & 8 ? words[w + 2] : words[w];
  if constexpr (kItem < 8) {
    for (int w = 0; w < 5; ++w) words[w] = shift & 4 ? words[w + 1] : words[w];
  }
  if constexpr (kItem < 4) {
    for (int w = 0; w < 4; ++w) words[w] = funnel_shift(words[w], words[w + 1], 8 * shift);
  }
  return {{words[0], words[1], words[2], words[3]}};
}

// Position of a tile in its job.
struct Tile {
  int32_t column;  // offset in bytes from the start of a row that begins at a granule boundary
  uint32_t in_line;
  uint32_t line;

  GPUDIST_HOST_DEVICE Tile(const CombineJob& job, uint32_t number) {
    const uint32_t row = job.columns.quotient(number);
    column = static_cast<int32_t>(number - row * job.columns.value) * CombineTile::kGranule;
    line = job.line.quotient(row);
    in_line = row - line * job.line.value;
  }
};

struct CombineThread {
  const CombineArguments& arguments;
  const CombineJob& job;
  const CombineView* views;  // views of the job
  bool is_worthless;         // write all-ones bytes and ignore the summands

  GPUDIST_HOST_DEVICE int summands() const { return is_worthless ? 0 : job.summands; }
  // The fill value, rotated for a granule that begins `skew` bytes before the tile's column.
  template <int kItem>
  GPUDIST_HOST_DEVICE Granule fill(uint32_t skew) const {
    if (is_worthless) return {{kOnes, kOnes, kOnes, kOnes}};
    const Granule items = at<Granule>(reinterpret_cast<const char*>(arguments.fill));
    return shifted<kItem>(items, items, -skew % 16);
  }
};

// Steps through the rows of a tile in one view.
template <int kItem>
struct Cursor {
  char* at;  // address of the tile's column in the current row
  int64_t step;
  bool may_read_granules;  // whether whole granules may be read for all rows of the tile

  Cursor() = default;
  GPUDIST_HOST_DEVICE Cursor(const CombineThread& thread, const CombineView& view,
                             const Tile& tile) {
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
    // A piece starts up to a granule less one item before its column, and the first granule read
    // for it up to as many bytes earlier.
    constexpr int64_t kBefore = 2 * (CombineTile::kGranule - kItem);
    may_read_granules = offset - kBefore >= view.offset && offset + view.reach <= view.stop;
  }
};

// Part of one row that lies in one granule of the destination.
template <int kItem>
struct RowPiece {
  uint32_t skew;  // bytes between the start of the granule and the tile's column
  uint32_t bits;  // mask of the items that belong to the row

  RowPiece() = default;
  // `left`: bytes from the column to the end of the row.
  GPUDIST_HOST_DEVICE RowPiece(const char* at, const Tile& tile, int32_t left) {
    skew = reinterpret_cast<uintptr_t>(at) % 16;
    const int32_t start = tile.column == 0 ? static_cast<int32_t>(skew) : 0;
    int32_t stop = left + static_cast<int32_t>(skew);
    stop = stop > 16 ? 16 : stop < start ? start : stop;
    bits = (1u << (stop / kItem)) - (1u << (start / kItem));
  }
};

// Load only the selected items.
template <int kItem>
GPUDIST_HOST_DEVICE inline Granule load(const char* from, uint32_t bits) {
  Granule granule{};
  if constexpr (kItem >= 4) {
    for (int w = 0; w < Granule::kWords; ++w) {
      if (bits >> (4 * w / kItem) & 1) granule.words[w] = at<uint32_t>(from + 4 * w);
    }
  } else {
    using Item = std::conditional_t<kItem == 1, uint8_t, uint16_t>;
    for (int k = 16 / kItem - 1; k >= 0; --k) {
      const uint32_t item = bits >> k & 1 ? at<Item>(from + k * kItem) : 0;
      uint32_t& word = granule.words[k * kItem / 4];
      word = word << (8 * kItem) | item;
    }
  }
  return granule;
}

// Load the pieces of `kViews` summands; all loads are issued before any result is used. `piece(i)`
// computes the piece of row `i`, and `address(i)` that of its column in the destination.
template <int kItem, int kViews, int kCount, class Piece, class Address>
GPUDIST_HOST_DEVICE inline void gather(Cursor<kItem> (&cursors)[kViews], Piece piece,
                                       Address address, Granule (&granules)[kViews][kCount]) {
  bool may_read_granules = true;
  for (const Cursor<kItem>& cursor : cursors) may_read_granules &= cursor.may_read_granules;
  if (!may_read_granules) {
    for (int v = 0; v < kViews; ++v) {
      for (int i = 0; i < kCount; ++i) {
        const RowPiece<kItem> one = piece(i);
        granules[v][i] = load<kItem>(cursors[v].at - one.skew, one.bits);
        cursors[v].at += cursors[v].step;
      }
    }
    return;
  }
  Granule low[kViews][kCount], high[kViews][kCount];
  uint32_t shift[kViews][kCount];
  for (int v = 0; v < kViews; ++v) {
    for (int i = 0; i < kCount; ++i) {
      const char* from = cursors[v].at - reinterpret_cast<uintptr_t>(address(i)) % 16;
      shift[v][i] = reinterpret_cast<uintptr_t>(from) % 16;
      from -= shift[v][i];
      low[v][i] = at<Granule>(from);
      high[v][i] = at<Granule>(from + 16);
      cursors[v].at += cursors[v].step;
    }
  }
  for (int v = 0; v < kViews; ++v) {
    for (int i = 0; i < kCount; ++i) {
      granules[v][i] = shifted<kItem>(low[v][i], high[v][i], shift[v][i]);
    }
  }
}

// Operation for a single summand: a copy, in items of at least `kBytes` bytes.
template <int kBytes>
struct Same {
  static constexpr int kItem = kBytes;
  Granule granule;

  GPUDIST_HOST_DEVICE void start(const Granule& other) { granule = other; }
  GPUDIST_HOST_DEVICE void add(const Granule&) {}
  GPUDIST_HOST_DEVICE Granule result() const { return granule; }
};

// Adds granules item by item.
template <class T>
struct PlainSum : Same<sizeof(T)> {
  using Same<sizeof(T)>::granule;
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

  // Item `k` starts in this word; an 8-byte item continues in the next.
  GPUDIST_HOST_DEVICE static T item(const Granule& granule, int k) {
    Bits bits = granule.words[k];
    if (sizeof(T) == 8) bits |= static_cast<uint64_t>(granule.words[k + 1]) << 32;
    return bits_as<T>(bits);
  }
  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): chosen when compiled
  GPUDIST_HOST_DEVICE void add(const Granule& other) {
    for (int k = 0; k < Granule::kWords; k += sizeof(T) / 4) {
      const uint64_t bits = bits_as<Bits>(item(granule, k) + item(other, k));
      granule.words[k] = static_cast<uint32_t>(bits);
      if (sizeof(T) == 8) granule.words[k + 1] = static_cast<uint32_t>(bits >> 32);
    }
  }
};

// Adds 8- or 16-bit integers packed in a register; masking the top bits stops carries between them.
template <class T>
struct PackedSum : Same<sizeof(T)> {
  using Same<sizeof(T)>::granule;
  static constexpr uint32_t kTopBits = ~uint32_t{0} / T(~T{0}) << (8 * sizeof(T) - 1);

  // NOLINTNEXTLINE(bugprone-derived-method-shadowing-base-method): chosen when compiled
  GPUDIST_HOST_DEVICE void add(const Granule& other) {
    for (int w = 0; w < Granule::kWords; ++w) {
      const uint32_t a = granule.words[w], b = other.words[w];
      granule.words[w] = ((a & ~kTopBits) + (b & ~kTopBits)) ^ ((a ^ b) & kTopBits);
    }
  }
};

// Adds 16-bit floats in float32.
template <class Pair>
struct WideSum {
  static constexpr int kItem = 2;
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

// Compute one tile, `kCount` rows at a time; all rows are read before any is written. Cursors of
// the first `kHeld` summands are computed once per tile, those of the others once per `kCount`
// rows.
template <class Sum, int kHeld, int kCount>
GPUDIST_HOST_DEVICE inline void make_tile(const CombineThread& thread, uint32_t number) {
  using Cursor = combining::Cursor<Sum::kItem>;
  using RowPiece = combining::RowPiece<Sum::kItem>;
  const CombineJob& job = thread.job;
  const Tile tile(job, number);
  Cursor to(thread, thread.views[0], tile);
  Cursor cursors[kHeld];
  for (int v = 0; v < kHeld; ++v) {
    const bool is_there = kHeld > 1 || thread.summands() > 0;
    cursors[v] = Cursor(thread, thread.views[is_there ? v + 1 : 0], tile);
  }
  const int32_t of_row = job.row_bytes - tile.column;
  int32_t of_line =
      job.line_bytes - tile.column - static_cast<int32_t>(tile.in_line) * job.tile_bytes;
  GPUDIST_NOT_UNROLLED
  for (int row = 0; row < CombineTile::kRows && of_line > -CombineTile::kGranule; row += kCount) {
    const auto address = [&](int i) { return to.at + i * to.step; };
    const auto piece = [&](int i) {
      const int32_t left = of_line - i * job.step_bytes;
      return RowPiece(address(i), tile, of_row < left ? of_row : left);
    };
    Sum sums[kCount];
    if (kHeld > 1 || thread.summands() > 0) {
      Granule granules[kHeld][kCount];
      gather(cursors, piece, address, granules);
      for (int i = 0; i < kCount; ++i) {
        sums[i].start(granules[0][i]);
        for (int v = 1; v < kHeld; ++v) sums[i].add(granules[v][i]);
      }
    } else {
      for (int i = 0; i < kCount; ++i) sums[i].start(thread.fill<Sum::kItem>(piece(i).skew));
    }
    if (kHeld > 1) {
      GPUDIST_NOT_UNROLLED
      for (int v = kHeld + 1; v <= thread.summands(); ++v) {
        Granule granules[1][kCount];
        Cursor other[] = {Cursor(thread, thread.views[v], Tile(job, number))};
        other[0].at += row * other[0].step;
        gather(other, piece, address, granules);
        for (int i = 0; i < kCount; ++i) sums[i].add(granules[0][i]);
      }
    }
    for (int i = 0; i < kCount; ++i) {
      const RowPiece one = piece(0);
      store<Sum::kItem>(to.at - one.skew, one.bits, sums[i].result());
      to.at += to.step;
      of_line -= job.step_bytes;
    }
  }
}

// Copy or fill one tile whose rows are single words.
template <class Word>
GPUDIST_HOST_DEVICE inline void make_words(const CombineThread& thread, uint32_t number) {
  const CombineJob& job = thread.job;
  const Tile tile(job, number);
  const bool is_copy = job.summands > 0;
  Cursor<1> to(thread, thread.views[0], tile), from(thread, thread.views[is_copy ? 1 : 0], tile);
  const Word fill = at<Word>(reinterpret_cast<const char*>(thread.arguments.fill));
  const int32_t left = job.line_bytes - static_cast<int32_t>(tile.in_line) * job.tile_bytes;
  Word words[CombineTile::kRows];
  for (int i = 0; i < CombineTile::kRows; ++i) {
    const bool is_there = is_copy && i * job.step_bytes < left;
    words[i] = is_there ? at<Word>(from.at + i * from.step) : fill;
  }
  for (int i = 0; i < CombineTile::kRows; ++i) {
    if (i * job.step_bytes < left) at<Word>(to.at + i * to.step) = words[i];
  }
}

// Sums of integers wrap; C++ defines that for unsigned types only.
GPUDIST_HOST_DEVICE inline void make(const CombineThread& thread, uint32_t tile) {
  if (thread.summands() <= 1) {
    // Faces of the last dim.
    if (thread.job.row_bytes == thread.job.unit) {
      switch (thread.job.unit) {
        case 1: return make_words<uint8_t>(thread, tile);
        case 2: return make_words<uint16_t>(thread, tile);
        case 4: return make_words<uint32_t>(thread, tile);
        case 8: return make_words<uint64_t>(thread, tile);
        default: break;
      }
    }
    switch (thread.job.unit) {
      case 1: return make_tile<Same<1>, 1, 2>(thread, tile);  // four rows spill
      case 2: return make_tile<Same<2>, 1, 4>(thread, tile);
      default: return make_tile<Same<4>, 1, 4>(thread, tile);
    }
  }
  switch (thread.arguments.dtype) {
    case Dtype::kUint8:
    case Dtype::kInt8: return make_tile<PackedSum<uint8_t>, 2, 1>(thread, tile);
    case Dtype::kInt16: return make_tile<PackedSum<uint16_t>, 2, 1>(thread, tile);
    case Dtype::kInt32: return make_tile<PlainSum<uint32_t>, 2, 1>(thread, tile);
    case Dtype::kInt64: return make_tile<PlainSum<uint64_t>, 2, 1>(thread, tile);
    case Dtype::kFloat16: return make_tile<WideSum<Float16Pair>, 2, 1>(thread, tile);
    case Dtype::kBfloat16: return make_tile<WideSum<Bfloat16Pair>, 2, 1>(thread, tile);
    case Dtype::kFloat32: return make_tile<PlainSum<float>, 2, 1>(thread, tile);
    case Dtype::kFloat64: return make_tile<PlainSum<double>, 2, 1>(thread, tile);
    default: return;  // unreachable: CombinePlan refuses other dtypes
  }
}

// A block's job, and its place among the blocks of that job: behind the last one if it is idle.
struct Place {
  uint32_t job, block;

  GPUDIST_HOST_DEVICE Place(const CombineArguments& arguments, const CombineJob* jobs,
                            uint32_t number) {
    const bool is_grouped = number < arguments.grouped_blocks;
    const uint32_t group = is_grouped ? arguments.group.quotient(number) : 0;
    number -= group * arguments.group.value;
    job = is_grouped ? 0 : arguments.grouped_jobs;
    uint32_t stop = is_grouped ? arguments.grouped_jobs : arguments.job_count;
    while (stop - job > 1) {
      const uint32_t middle = job + (stop - job) / 2;
      if (jobs[middle].first_block <= number) {
        job = middle;
      } else {
        stop = middle;
      }
    }
    block = group * jobs[job].group_blocks + number - jobs[job].first_block;
  }
};

}  // namespace combining

GPUDIST_HOST_DEVICE inline void combine(const CombineArguments& arguments, const CombineJob* jobs,
                                        const CombineView* views, uint32_t block, uint32_t thread) {
  using namespace combining;
  const Place place(arguments, jobs, block);
  const CombineJob& job = jobs[place.job];
  const CombineView* const job_views = views + job.first_view;
  const uint32_t first = place.block * CombineArguments::kThreads + thread;
  const bool failed = is_set(arguments.failed);
  if (job.summands != CombineJob::kAlreadyThere && first < job.tiles) {
    make({arguments, job, job_views, false}, first);
  }
  if (!failed) return;
  const uint32_t step = job.blocks * CombineArguments::kThreads;
  GPUDIST_NOT_UNROLLED
  for (uint32_t tile = first; tile < job.tiles; tile += step) {
    make_tile<Same<1>, 1, 1>({arguments, job, job_views, true}, tile);
  }
}

}  // namespace gpudist
