"""Composition of windows: the cells of every input that outputs of the last window read."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.windows import Window


@dataclass(frozen=True)
class Read:
    """Range of inputs that a range of outputs of one window reads along a dim.

    Attributes:
        extent: global number of inputs.
        outputs: range of outputs.
        needed: range of inputs the outputs read; cells beyond ``[0, extent)`` are padding.
    """

    extent: int
    outputs: tuple[int, int]
    needed: tuple[int, int]

    @property
    def inside(self) -> tuple[int, int]:
        """Needed range without padding; empty if the outputs read only padding."""
        low, high = self.needed
        return min(max(low, 0), self.extent), min(max(high, 0), self.extent)

    @property
    def overhang(self) -> tuple[int, int]:
        """Number of padding cells in front of and behind ``inside``."""
        low, high = self.needed
        first, last = self.inside
        return (first - low, high - last) if first < last else (high - low, 0)


@dataclass(frozen=True)
class ComposedWindow:
    """Sequence of windows, each of which reads the outputs of the previous one.

    Cells that a window reads beyond the global extent of its input are padding, and do not depend
    on previous windows. Needed ranges therefore never leave the global extent.

    Attributes:
        windows: at least one window; the first reads the input.
    """

    windows: tuple[Window, ...]

    def outputs(self, inputs: Blocks) -> Blocks:
        for window in self.windows:
            inputs = window.outputs(inputs)
        return inputs

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return self.reads(start, stop, extent)[0].inside

    def reads(self, start: int, stop: int, extent: int) -> tuple[Read, ...]:
        """Return the ranges that each window reads for outputs ``[start, stop)`` of the last one.

        The outputs of each window are the cells inside the extent that the next window needs. An
        empty range of outputs needs nothing from any window.
        """
        extents = [extent]
        for window in self.windows[:-1]:
            extents.append(window.outputs(Blocks(extents[-1], 1)).extent)
        found: list[Read] = []
        outputs = (start, stop)
        for window, inputs in zip(reversed(self.windows), reversed(extents), strict=True):
            low, high = window.needed(*outputs, inputs)
            # The ends are monotone in the outputs, even if an intermediate window computes nothing.
            found.append(Read(inputs, outputs, (low, max(low, high) if start < stop else low)))
            outputs = found[-1].inside
        return tuple(reversed(found))
