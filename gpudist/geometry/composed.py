"""Windows one after the other: what a range of the last one's outputs reads of every input."""

from __future__ import annotations

from dataclasses import dataclass

from gpudist.geometry.blocks import Blocks
from gpudist.geometry.windows import Window


@dataclass(frozen=True)
class Read:
    """What a range of one window's outputs reads along a dim.

    Attributes:
        extent: global number of inputs.
        outputs: range of outputs.
        needed: range of inputs that they read; cells beyond ``[0, extent)`` are padding.
    """

    extent: int
    outputs: tuple[int, int]
    needed: tuple[int, int]

    @property
    def inside(self) -> tuple[int, int]:
        """What is needed and no padding; empty where the outputs read padding only."""
        low, high = self.needed
        return min(max(low, 0), self.extent), min(max(high, 0), self.extent)

    @property
    def overhang(self) -> tuple[int, int]:
        """Cells of padding in front of ``inside`` and behind it."""
        low, high = self.needed
        first, last = self.inside
        return (first - low, high - last) if first < last else (high - low, 0)


@dataclass(frozen=True)
class ComposedWindow:
    """Windows one after the other, of which each reads the outputs of the one before.

    Whatever a window reads beyond the global extent of its input is padding, and needs nothing of
    the windows before. Needed ranges therefore never leave the global extent.

    Attributes:
        windows: at least one; the first reads the input.
    """

    windows: tuple[Window, ...]

    def outputs(self, inputs: Blocks) -> Blocks:
        for window in self.windows:
            inputs = window.outputs(inputs)
        return inputs

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return self.reads(start, stop, extent)[0].inside

    def reads(self, start: int, stop: int, extent: int) -> tuple[Read, ...]:
        """What each window has to read, for outputs ``[start, stop)`` of the last one.

        Each one's outputs are what the next one needs inside the extent; no outputs of the last one
        need nothing of any.
        """
        extents = [extent]
        for window in self.windows[:-1]:
            extents.append(window.outputs(Blocks(extents[-1], 1)).extent)
        found: list[Read] = []
        outputs = (start, stop)
        for window, inputs in zip(reversed(self.windows), reversed(extents), strict=True):
            low, high = window.needed(*outputs, inputs)
            # Ends grow with the outputs even where a window in between has none to compute.
            found.append(Read(inputs, outputs, (low, max(low, high) if start < stop else low)))
            outputs = found[-1].inside
        return tuple(reversed(found))
