// Places of threads: the cells that each has in a pass.
#pragma once

#include "core/norm_threads.h"

namespace gpudist {
namespace norming {

// Place of a thread in a pass over rows: `lanes` threads share a line, or a part of one.
struct RowPlace {
  uint32_t lane, number;  // `number` of the line in its block of threads
  bool is_there;
  uint32_t line;
  int64_t begin, end;  // cells of the part
  uint32_t part;

  GPUDIST_HOST_DEVICE RowPlace(const NormArguments& a, uint32_t block, uint32_t thread) {
    const NormGrid& grid = a.grid;
    lane = thread & (grid.lanes - 1);
    number = thread / grid.lanes;
    const uint32_t unit = grid.parts == 1 ? block : block / grid.parts;
    part = block - unit * grid.parts;
    line = unit * (kThreads / grid.lanes) + number;
    is_there = line < a.outer * a.channels;
    begin = int64_t{part} * grid.part_cells;
    end = begin + grid.part_cells < a.cells ? begin + grid.part_cells : a.cells;
  }

  // Factors of the line.
  template <class Factors, bool kOfCells = false>
  GPUDIST_HOST_DEVICE Factors factors(const NormArguments& a) const {
    const uint32_t outer = kOfCells || a.channels == 1 ? line : line / a.channels;
    return Factors::template of<kOfCells>(a, outer, line - outer * a.channels);
  }
};

// Place of a thread in a pass over columns: it has `kWidth` columns, in every `steps`-th row.
template <int kWidth>
struct ColumnPlace {
  uint32_t x, y, steps;
  uint32_t tile, part, outer;
  int64_t column;
  int64_t begin, end;  // rows of the part

  GPUDIST_HOST_DEVICE ColumnPlace(const NormGrid& grid, int64_t rows, uint32_t block,
                                  uint32_t thread) {
    x = thread & (grid.lanes - 1);
    y = thread / grid.lanes;
    steps = kThreads / grid.lanes;
    const uint32_t rest = block / grid.tiles;
    tile = block - rest * grid.tiles;
    outer = rest / grid.parts;
    part = rest - outer * grid.parts;
    column = (static_cast<int64_t>(tile) * grid.lanes + x) * kWidth;
    begin = int64_t{part} * grid.part_cells;
    end = begin + grid.part_cells < rows ? begin + grid.part_cells : rows;
  }
};

}  // namespace norming
}  // namespace gpudist
