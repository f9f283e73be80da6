"""Padding by copies of inner cells, and the ranges that windows then read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks
from gpudist.geometry.windows import Window

CopyingMode = Literal["reflect", "replicate"]


@dataclass(frozen=True)
class PaddingWindow:
    """One output for every cell of the padded extent; negative padding crops.

    Attributes:
        left, right: cells of padding in front of and behind the global extent.
    """

    left: int = 0
    right: int = 0

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(inputs.extent + self.left + self.right, inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start - self.left, stop - self.left


@dataclass(frozen=True)
class FoldedWindow:
    """Window whose cells beyond the global edge are copies of cells inside.

    Needed ranges never leave the global extent: they are the hull of the cells that are read and of
    the cells that are copied. Ranges must be monotone in the outputs. Therefore, with reflected
    padding, the ranges of outputs near an edge cover the whole reflection, even if the outputs read
    less of it.

    Attributes:
        window: window that reads beyond the edge.
        mode: ``"reflect"`` to mirror at the edge cell, ``"replicate"`` to repeat the edge cell.
    """

    window: Window
    mode: CopyingMode

    def outputs(self, inputs: Blocks) -> Blocks:
        require_padding_fits(self.mode, self._overhang(inputs.extent), inputs.extent)
        return self.window.outputs(inputs)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        low, high = self.window.needed(start, stop, extent)
        low, high = min(max(low, 0), extent - 1), max(min(high, extent), 1)
        if self.mode == "replicate":
            return low, high
        front, behind = self._overhang(extent)
        if behind:
            low = min(low, extent - 1 - behind)
        return low, max(high, front + 1) if front else high

    def _overhang(self, extent: int) -> tuple[int, int]:
        outputs = self.window.outputs(Blocks(extent, 1)).extent
        if outputs == 0:
            return 0, 0
        low, high = self.window.needed(0, 1, extent)[0], self.window.needed(0, outputs, extent)[1]
        return max(0, -low), max(0, high - extent)


def require_padding_fits(mode: str, padding: tuple[int, int], extent: int) -> None:
    """Raise for padding that torch rejects for a global ``extent``.

    Args:
        mode: ``"reflect"``, ``"replicate"`` or ``"circular"``; any other mode pads with a constant.
        padding: cells in front and behind; negative numbers crop.
        extent: global extent before padding.

    Raises:
        ShapeError: if reflected padding is not less than the extent, replicated padding has no cell
            to copy, circular padding wraps more than once, or padding crops more cells than exist.
    """
    left, right = padding
    if mode == "reflect" and max(padding) >= max(extent, 1):
        raise ShapeError(
            f"reflected padding {padding} must be less than the global extent {extent} on both "
            "sides; pad less or use another padding mode"
        )
    if mode == "circular" and max(padding) > extent:
        raise ShapeError(
            f"circular padding {padding} must be at most the global extent {extent} on both sides; "
            "pad less or use another padding mode"
        )
    if mode in ("reflect", "replicate") and (extent == 0 or extent + left + right < 1):
        raise ShapeError(
            f"padding {padding} in mode {mode!r} needs at least one cell and must leave one, but "
            f"the global extent is {extent}"
        )
    if mode not in ("reflect", "replicate") and extent + min(left, 0) + min(right, 0) < 0:
        raise ShapeError(f"padding {padding} crops more cells than the global extent {extent} has")
