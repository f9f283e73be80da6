"""Partial windows: the parts of windows that workers reduce before sending anything.

A worker has one part for every window with cells in its block. The concatenated parts of all
workers of an axis form a tensor. Parts of one window are adjacent in it, so a halo exchange copies
them to the worker that owns the output, however large the windows are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.halo import needed_range
from gpudist.geometry.windows import Window

Range = tuple[int, int]


@dataclass(frozen=True)
class PartsWindow:
    """Map from ranges of outputs to the ranges of their parts, along one dim.

    At most one window may cross a boundary between blocks, as is the case if windows have at most
    one cell in common.

    Attributes:
        inputs: cut of the cells into blocks.
        window: window that the parts are cut from.
    """

    inputs: Blocks
    window: Window

    @cached_property
    def parts(self) -> Blocks:
        """Blocks of the parts, computed in time proportional to the workers along the axis."""
        ranges = [self.windows_of(index) for index in range(self.inputs.parts)]
        return Blocks.of_sizes([stop - start for start, stop in ranges])

    @cached_property
    def moves(self) -> bool:
        """Whether any window has parts on a worker that does not own its output."""
        workers = range(self.inputs.parts)
        return any(needed_range(self.parts, self, i) != self.parts.block(i) for i in workers)

    def outputs(self, inputs: Blocks) -> Blocks:
        return self.window.outputs(self.inputs)

    def needed(self, start: int, stop: int, extent: int) -> Range:
        if start >= stop:
            return 0, 0
        return self._parts_of(start)[0], self._parts_of(stop - 1)[1]

    def windows_of(self, index: int) -> Range:
        """Return the range of the windows that have cells in block ``index``."""
        first, last = self.inputs.block(index)
        windows = range(self.outputs(self.inputs).extent)
        start = bisect_left(windows, True, key=lambda i: self._cells_of(i)[1] > first)
        stop = bisect_left(windows, True, key=lambda i: self._cells_of(i)[0] >= last)
        return (start, max(start, stop)) if first < last else (0, 0)

    def own_cells(self, index: int) -> list[Range]:
        """Return the ranges of own cells that the worker ``index`` reduces, one per part."""
        first, last = self.inputs.block(index)
        cells = [self._cells_of(window) for window in range(*self.windows_of(index))]
        return [(max(start, first) - first, min(stop, last) - first) for start, stop in cells]

    def own_lengths(self, index: int) -> list[int]:
        """Return the length of the whole window of each part, in cells."""
        cells = [self._cells_of(window) for window in range(*self.windows_of(index))]
        return [stop - start for start, stop in cells]

    def own_parts(self, index: int) -> list[Range]:
        """Return the ranges of parts that the worker ``index`` finally reduces, one per output."""
        origin = needed_range(self.parts, self, index)[0]
        parts = [self._parts_of(o) for o in range(*self.outputs(self.inputs).block(index))]
        return [(start - origin, stop - origin) for start, stop in parts]

    def _cells_of(self, window: int) -> Range:
        start, stop = self.window.needed(window, window + 1, self.inputs.extent)
        return max(start, 0), min(stop, self.inputs.extent)

    def _parts_of(self, window: int) -> Range:
        workers = [index for index, _, _ in self.inputs.overlapping(*self._cells_of(window))]
        places = [
            self.parts.block(i)[0] + window - self.windows_of(i)[0]
            for i in (workers[0], workers[-1])
        ]
        return places[0], places[1] + 1


def coincides(ranges: Sequence[Range], window: Window, extent: int) -> bool:
    """Return whether ``ranges`` are exactly the ranges of ``window`` over ``extent`` cells."""
    return all(window.needed(i, i + 1, extent) == cells for i, cells in enumerate(ranges))
