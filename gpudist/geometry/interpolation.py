"""Windows of interpolation.

Positions are computed and rounded exactly as in torch's kernels, because an error of one cell would
change the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gpudist.geometry.blocks import Blocks

InterpolationMode = Literal["nearest", "nearest-exact", "linear", "cubic"]
Kernel = Literal["general", "small", "cuda"]
Cells = NDArray[np.int64]
Reals = NDArray[Any]

# Beyond this size, float32 cannot represent the middle between two cells.
_MOST_EXACT_OUTPUTS = 1 << 22
_CUBIC = -0.75


@dataclass(frozen=True)
class InterpolationWindow:
    """Output ``i`` reads one, two or four cells around its position among the inputs.

    Needed ranges never leave the global extent: taps beyond it read the cell at the edge.

    Attributes:
        mode: interpolation mode along this dim.
        size: global number of outputs.
        scale_factor: scale of the positions, unless it is ``size`` over the input's extent.
        align_corners: whether the first and last outputs lie on the first and last inputs.
        single: whether positions are float32 instead of float64.
        kernel: torch kernel whose rounding to follow: on a CPU ``"small"``, for few outputs in two
            dims, or ``"general"``; ``"cuda"`` for the CUDA kernels.
    """

    mode: InterpolationMode
    size: int
    scale_factor: float | None = None
    align_corners: bool = False
    single: bool = False
    kernel: Kernel = "general"

    def outputs(self, inputs: Blocks) -> Blocks:
        return Blocks(self.size, inputs.parts)

    def needed(self, start: int, stop: int, extent: int) -> tuple[int, int]:
        ends = np.array([min(start, self.size - 1), max(start, stop - 1)])
        cells = self.cells(ends, extent)
        first = int(cells[0, 0])
        return (first, int(cells[-1, 1]) + 1) if start < stop else (first, first)

    def cells(self, outputs: Cells, extent: int) -> Cells:
        """Return the input cells that each output reads, ascending, ``[taps, outputs]``."""
        return self.taps(outputs, extent)[0]

    def taps(self, outputs: Cells, extent: int) -> tuple[Cells, Reals]:
        """Return the input cells that each output reads and their weights, ``[taps, outputs]``."""
        if self.mode in ("nearest", "nearest-exact"):
            cells = self._nearest(outputs, extent)[np.newaxis]
            return cells, np.ones(cells.shape, self._real)
        if self.mode == "linear" and self.size == extent:
            return outputs[np.newaxis], np.ones((1, len(outputs)), self._real)
        position = self._position(outputs, extent)
        first = np.minimum(self._floor(position), extent - 1)
        fraction = np.minimum(np.maximum(position - first.astype(self._real), 0), 1)
        if self.mode == "linear":
            cells = np.stack([first, np.minimum(first + 1, extent - 1)])
            return cells, np.stack([1 - fraction, fraction])
        cells = np.stack(
            [np.minimum(np.maximum(first + step, 0), extent - 1) for step in (-1, 0, 1, 2)]
        )
        return cells, _cubic_weights(fraction)

    def exact_factor(self, extent: int) -> int | None:
        """Return the power of two by which ``extent`` grows; ``None`` if positions are rounded.

        Only with such a factor are a block's outputs independent of its start.
        """
        factor, rest = divmod(self.size, extent)
        is_exact = (
            rest == 0
            and factor > 0
            and factor & (factor - 1) == 0
            and self.scale_factor in (None, factor)
            and not self.align_corners
            and self.size <= _MOST_EXACT_OUTPUTS
        )
        return factor if is_exact else None

    @property
    def _real(self) -> Any:
        return np.float32 if self.single else np.float64

    def _ratio(self, extent: int) -> Any:
        real = self._real
        if self.align_corners:
            return real(extent - 1) / real(self.size - 1) if self.size > 1 else real(0)
        if self.scale_factor is not None:
            return real(1 / self.scale_factor)
        return real(extent) / real(self.size)

    def _position(self, outputs: Cells, extent: int) -> Reals:
        real, ratio = self._real, self._ratio(extent)
        if self.align_corners:
            return ratio * outputs.astype(real)
        position = ratio * (outputs.astype(real) + real(0.5)) - real(0.5)
        return position if self.mode == "cubic" else np.maximum(position, real(0))

    def _nearest(self, outputs: Cells, extent: int) -> Cells:
        if self.mode == "nearest-exact":
            position = self._exact_position(outputs, extent)
        elif self.kernel == "small" and self.size in (extent, 2 * extent):
            return outputs * extent // self.size
        else:
            position = self._ratio(extent) * outputs.astype(self._real)
        return np.minimum(self._floor(position), extent - 1)

    def _exact_position(self, outputs: Cells, extent: int) -> Reals:
        real, ratio = self._real, self._ratio(extent)
        if self.kernel == "cuda":
            return ratio * (outputs.astype(real) + real(0.5))
        return self._position(outputs, extent).astype(np.float64) + 0.5

    def _floor(self, position: Reals) -> Cells:
        # CPU kernels take the floor of a float32 for every dtype of the tensor.
        rounded = position if self.kernel == "cuda" else position.astype(np.float32)
        return np.floor(rounded).astype(np.int64)


def _cubic_weights(fraction: Reals) -> Reals:
    """Return the weights of the four cells around a position ``fraction`` behind the second one."""
    a = fraction.dtype.type(_CUBIC)

    def near(x: Reals) -> Reals:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Reals) -> Reals:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    rest = 1 - fraction
    return np.stack([far(fraction + 1), near(fraction), near(rest), far(rest + 1)])
