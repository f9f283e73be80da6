"""Local pooling that computes one worker's block of the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpudist.geometry.windows import PoolWindow
from gpudist.nn.pool.local import (
    LocalPool,
    behind_margin,
    coordinates,
    flat_indices,
    gather_cells,
    no_samples,
)


@dataclass(frozen=True)
class PoolBlock:
    """Pooling that computes exactly one worker's outputs.

    Attributes:
        pool: local pool of torch.
        windows: pooling windows, one per spatial dim.
        count_include_pad: whether padding counts in a mean.
        shape: shape of the output block; may be empty.
        extents: global extents of the input, per spatial dim.
        outputs: global index of the first output, per spatial dim.
        padding: cells of padding on both sides of the pooled tensor, per spatial dim.
        holds_padding: whether the pooled tensor itself may contain cells of padding at its ends.
    """

    pool: LocalPool
    windows: tuple[PoolWindow, ...]
    count_include_pad: bool
    shape: tuple[int, ...]
    extents: tuple[int, ...]
    outputs: tuple[int, ...]
    padding: tuple[int, ...]
    holds_padding: bool = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.apply(x)[0])

    def apply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return maxima and their flat indices in ``x``, or means over all cells of the kernel."""
        if 0 in self.shape:
            y, _ = self._apply(no_samples(x, [window.reach for window in self.windows]))
            return y.view(self.shape), None
        return self._apply(x)

    def _apply(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        has_margin = self.holds_padding and any(window.padding[0] for window in self.windows)
        if not (self.pool.takes_maximum and has_margin):
            y, places = self.pool.forward(x, self.padding)
            if y.shape[2:] == self.shape[2:] or 0 in self.shape:
                return y, places
            kept = (..., *(slice(n) for n in self.shape[2:]))
            return y[kept], None if places is None else places[kept]
        _, places = self.pool.maxima(x.detach(), self.padding)
        margin = self.margin_before(self.outputs)
        places = behind_margin(places, x.shape[2:], margin, self.pool.dilation)
        return gather_cells(x, places), places

    def scale(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output for a result of :meth:`apply`, with corrected means."""
        if self.pool.takes_maximum or self.pool.divisor is not None:
            return y
        per_dim = list(zip(self.windows, self.extents, strict=True))
        are_cut = any(window.cuts(extent) for window, extent in per_dim)
        has_padding = any(window.padding[0] for window in self.windows)
        if not are_cut and (self.count_include_pad or not has_padding):
            return y
        counts = torch.ones((), dtype=y.dtype, device=y.device)
        dims = zip(per_dim, self.outputs, self.shape[2:], strict=True)
        for (window, extent), start, length in dims:
            padding = window.padding[0]
            counted = padding if self.count_include_pad else 0
            outputs = torch.arange(start, start + length, device=y.device)
            first = outputs * window.stride - padding
            last = (first + window.kernel).clamp(max=extent + counted)
            counts = counts.unsqueeze(-1) * (last - first.clamp(min=-counted)).to(y.dtype)
        return y * (prod(self.pool.kernel) / counts)

    def global_places(
        self, places: torch.Tensor, shape: Sequence[int], origin: Sequence[int]
    ) -> torch.Tensor:
        """Convert flat indices in a block of ``shape`` at ``origin`` to global flat indices."""
        cells = zip(coordinates(places, shape), origin, strict=True)
        return flat_indices([cell + start for cell, start in cells], self.extents)

    def first_cells(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """Return the first cell that an output reads, per spatial dim; negative in padding."""
        per_dim = zip(outputs, self.windows, strict=True)
        return tuple(output * window.stride - window.padding[0] for output, window in per_dim)

    def margin_before(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """Return the number of padding cells in front of the first cell that ``outputs`` read."""
        return tuple(max(0, -first) for first in self.first_cells(outputs))
