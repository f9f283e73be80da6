"""Windows: which cells of the input a range of outputs reads, along one dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from gpudist.checks.arguments import settle
from gpudist.errors import ShapeError
from gpudist.geometry.blocks import Blocks


class Window(Protocol):
    """Monotone map from ranges of outputs to ranges of inputs along one dim."""

    def outputs(self, inputs: Blocks) -> Blocks:
        """Return the blocks of the output for an input decomposed into ``inputs``."""
        ...

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        """Return the range of input cells that outputs ``[start, stop)`` read.

        Cells beyond ``[0, extent)`` are padding.
        """
        ...


@dataclass(frozen=True)
class SlidingWindow:
    """Window of a convolution or pooling: ``kernel`` taps, ``dilation`` cells apart.

    Attributes:
        kernel: number of taps, at least 1.
        stride: cells between the first taps of two adjacent outputs, at least 1.
        dilation: cells between two adjacent taps, at least 1.
        padding: cells of padding in front of and behind the global extent.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        settle(self)
        if min(self.kernel, self.stride, self.dilation) < 1 or min(self.padding) < 0:
            raise ShapeError(
                f"kernel {self.kernel}, stride {self.stride} and dilation {self.dilation} must be "
                f"at least 1 and padding {self.padding} at least 0"
            )

    @property
    def reach(self) -> int:
        """Number of cells from the first tap to the last, inclusive."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int) -> int:
        """Return the global number of outputs for ``extent`` inputs; raise if there is none."""
        padded = extent + sum(self.padding)
        if padded < self.reach:
            raise ShapeError(
                f"kernel {self.kernel} with dilation {self.dilation} needs {self.reach} cells but "
                f"the padded global extent is {padded}; pad the input or use a smaller kernel"
            )
        return (padded - self.reach) // self.stride + 1

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(self.output_extent(inputs.extent), inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        left = self.padding[0]
        return start * self.stride - left, (stop - 1) * self.stride - left + self.reach


@dataclass(frozen=True)
class PaddedWindow:
    """Sliding window of a layer that pads its block by the same number of cells on both sides.

    Needed ranges leave out the padding that the layer adds.

    Attributes:
        window: window with all of its padding.
    """

    window: SlidingWindow

    def outputs(self, inputs: Blocks) -> Blocks:
        return self.window.outputs(inputs)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        low, high = self.window.needed(start, stop, extent)
        padding = self.padding_of(start, stop, extent)
        return low + padding, high - padding

    def padding_of(self, start: int, stop: int, extent: int) -> int:
        """Return the cells that outputs ``[start, stop)`` read beyond both edges."""
        low, high = self.window.needed(start, stop, extent)
        return max(0, min(-low, high - extent))


@dataclass(frozen=True)
class TransposedWindow:
    """Window of a transposed convolution; needed ranges never leave the global extent.

    Attributes:
        kernel: number of taps of the convolution that this one transposes.
        stride: cells between two adjacent outputs of that convolution.
        dilation: cells between two adjacent taps.
        padding: cells cut from both ends of the output.
        output_padding: cells added behind the output.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    output_padding: int = 0

    def __post_init__(self) -> None:
        settle(self)
        steps = self.kernel, self.stride, self.dilation
        if min(steps) < 1 or min(self.padding, self.output_padding) < 0:
            raise ShapeError(
                f"kernel {self.kernel}, stride {self.stride} and dilation {self.dilation} must be "
                f"at least 1, padding {self.padding} and output_padding {self.output_padding} at "
                f"least 0"
            )

    @property
    def reach(self) -> int:
        """Number of outputs from the first to the last to which one input contributes."""
        return self.dilation * (self.kernel - 1) + 1

    def smallest_extent(self, extent: int) -> int:
        """Return the outputs for ``extent`` inputs without output padding; may be negative."""
        return (extent - 1) * self.stride + self.reach - 2 * self.padding

    def output_extent(self, extent: int) -> int:
        """Return the global number of outputs for ``extent`` inputs."""
        outputs = self.smallest_extent(extent) + self.output_padding
        if extent < 1 or outputs < 1:
            raise ShapeError(
                f"a transposed window with kernel {self.kernel}, stride {self.stride} and padding "
                f"{self.padding} has no output for {extent} cells"
            )
        return outputs

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(self.output_extent(inputs.extent), inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        first = -((self.reach - 1 - start - self.padding) // self.stride)
        last = (stop - 1 + self.padding) // self.stride + 1
        return min(max(first, 0), extent), min(last, extent)

    def reached(self, start: int, stop: int) -> tuple[int, int]:
        """Return the outputs to which input cells ``[start, stop)`` contribute, before cropping."""
        first = start * self.stride - self.padding
        return first, first + (stop - 1 - start) * self.stride + self.reach


@dataclass(frozen=True)
class HaloWidths:
    """Window of a stencil: the own block with ``left`` and ``right`` adjacent cells, or none.

    Negative widths drop cells of the own block.
    """

    left: int = 0
    right: int = 0

    def __post_init__(self) -> None:
        settle(self)

    def outputs(self, inputs: Blocks) -> Blocks:
        return inputs

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start - self.left, max(start - self.left, stop + self.right)


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
        reads_of_windows: list[Read] = []
        outputs = (start, stop)
        for window, inputs in zip(reversed(self.windows), reversed(extents), strict=True):
            low, high = window.needed(*outputs, inputs)
            # The ends are monotone in the outputs, even if an intermediate window computes nothing.
            reads_of_windows.append(
                Read(inputs, outputs, (low, max(low, high) if start < stop else low))
            )
            outputs = reads_of_windows[-1].inside
        return tuple(reversed(reads_of_windows))


@dataclass(frozen=True)
class PoolWindow(SlidingWindow):
    """Sliding window that may reach beyond the padded extent.

    Attributes:
        ceil_mode: whether the number of outputs is rounded up. The last window starts inside the
            extent or the padding in front of it, and is truncated at the end of the padding behind.
    """

    ceil_mode: bool = False

    def output_extent(self, extent: int) -> int:
        """Return the global number of outputs for ``extent`` inputs; raise if there is none."""
        if not self.ceil_mode:
            return super().output_extent(extent)
        padded = extent + sum(self.padding)
        outputs = -((self.reach - padded) // self.stride) + 1
        if (outputs - 1) * self.stride >= extent + self.padding[0]:
            outputs -= 1
        if outputs < 1:
            raise ShapeError(
                f"kernel {self.kernel} with dilation {self.dilation} and stride {self.stride} has "
                f"no output for a padded global extent of {padded}, even in ceil_mode; pad the "
                "input or use a smaller kernel"
            )
        return outputs

    def has_only_padding(self, extent: int) -> bool:
        """Return whether any window has no tap in ``[0, extent)``."""
        outputs = range(min(self.output_extent(extent), self.padding[0] // self.stride + 1))
        return any(self._first_tap(output) >= extent for output in outputs)

    def _first_tap(self, output: int) -> int:
        start = output * self.stride - self.padding[0]
        return start if start >= 0 else start % self.dilation


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


def source_cell(mode: str, cell: int, extent: int) -> int:
    """Return the cell of the extent that ``cell``, which may lie beyond an edge, is a copy of."""
    last = extent - 1
    if mode == "replicate":
        return min(max(cell, 0), last)
    return last - abs(last - abs(cell))


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


@dataclass(frozen=True)
class ExpandedWindow:
    """Cell ``i`` becomes outputs ``[i * factor, (i + 1) * factor)``.

    Attributes:
        factor: number of outputs per cell, at least 1.
    """

    factor: int

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(inputs.extent * self.factor, inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start // self.factor, -(-stop // self.factor)


@dataclass(frozen=True)
class AdaptiveWindow:
    """Output ``i`` of ``m`` reads cells ``[floor(i n / m), ceil((i + 1) n / m))`` of ``n``.

    Two windows have at most one cell in common. There may be more outputs than cells.

    Attributes:
        output_extent: global number of outputs.
    """

    output_extent: int

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(self.output_extent, inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        return start * extent // self.output_extent, -(-stop * extent // self.output_extent)
