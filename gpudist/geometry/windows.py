"""Windows: which cells of the input a range of outputs reads, along one dim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
        """Return the number of outputs without output padding, which may be negative."""
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
