"""Reductions of ranges of cells along one dim of a tensor ``[B, C, *spatial]``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from gpudist.geometry.adaptive import AdaptiveWindow
from gpudist.geometry.parts import Range, coincides
from gpudist.nn.local_pool import LocalPool
from gpudist.nn.parameter import tied_empty

ADAPTIVE_MAXIMUM = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


class _SideBySide:
    """The cells of every range one after the other, as many as the longest range has.

    Args:
        shape: of the tensor.
        dim: along which the ranges lie.
        ranges: of cells, at least one and none of them empty.
        device: of the tensor.

    Attributes:
        length: of the longest range.
        cells: index of each cell in the tensor; ``None`` where that is all of it as it is. A
            shorter range repeats its last cell.
        repeated: which are repetitions, as a mask of the result; ``None`` if none is.
    """

    def __init__(
        self, shape: Sequence[int], dim: int, ranges: Sequence[Range], device: torch.device
    ) -> None:
        self.dim = dim
        self.length = max(stop - start for start, stop in ranges)
        places = [(start + i, stop) for start, stop in ranges for i in range(self.length)]
        cells = [min(place, stop - 1) for place, stop in places]
        repeated = [place >= stop for place, stop in places]
        self.cells: torch.Tensor | None = None
        self.repeated: torch.Tensor | None = None
        if cells != list(range(shape[dim])):
            self.cells = torch.tensor(cells, device=device)
        if any(repeated):
            self.repeated = along(torch.tensor(repeated, device=device), dim, len(shape))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.cells is None else x.index_select(self.dim, self.cells)


class RangeSum:
    """Sums of ranges of cells along one dim, each divided by a number of its own.

    Their gradient depends on no cell: a rank without cells or ranges is alike in double backward.

    Args:
        shape, dim, ranges, device, dtype: as of the tensor and what is summed of it.
        divisors: one per range.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim: int,
        ranges: Sequence[Range],
        divisors: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.dim = dim
        self.output_shape = (*shape[:dim], len(ranges), *shape[dim + 1 :])
        self.beside: _SideBySide | None = None
        if 0 in shape or not ranges:
            return
        self.beside = _SideBySide(shape, dim, ranges, device)
        # A sum may be too large for a 16-bit float where no mean is.
        factors = [self.beside.length / divisor for divisor in divisors]
        self.factors: torch.Tensor | None = None
        if any(factor != 1 for factor in factors):
            factor = torch.tensor(factors, device=device, dtype=dtype)
            self.factors = along(factor, dim, len(shape))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.beside is None:
            return tied_empty(self.output_shape, x.dtype, x)
        cells = self.beside(x)
        if self.beside.repeated is not None:
            cells = cells.masked_fill(self.beside.repeated, 0)
        means = cells.unflatten(self.dim, (-1, self.beside.length)).mean(self.dim + 1)
        return means if self.factors is None else means * self.factors


class RangeMaximum:
    """Maxima of ranges of cells along one dim; ties and NaN as torch's pools.

    By torch's adaptive pool where its windows are the ranges. The gradient of torch's pools counts
    as depending on the cells, on every rank.
    """

    def __init__(
        self, shape: Sequence[int], dim: int, ranges: Sequence[Range], device: torch.device
    ) -> None:
        self.dim = dim
        self.shape = tuple(shape)
        self.output_shape = (*shape[:dim], len(ranges), *shape[dim + 1 :])
        self.is_empty = 0 in shape or not ranges
        self.is_adaptive = coincides(ranges, AdaptiveWindow(len(ranges)), shape[dim])
        if self.is_empty or self.is_adaptive:
            return
        self.beside = _SideBySide(shape, dim, ranges, device)
        kernel = tuple(self.beside.length if d == dim else 1 for d in range(2, len(shape)))
        self.pool = LocalPool(True, kernel, kernel, (1,) * len(kernel))

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The maxima, and where they are: flat indices in the spatial dims of ``x``."""
        if self.is_empty:
            y = tied_empty(self.output_shape, x.dtype, x, x)
            return y, x.new_empty(self.output_shape, dtype=torch.int64)
        if self.is_adaptive:
            pool = ADAPTIVE_MAXIMUM[len(self.shape) - 2]
            return pool(x, self.output_shape[2:], return_indices=True)
        y, places = self.pool.maxima(self.beside(x), (0,) * (len(self.shape) - 2))
        return y, self._in_tensor(places)

    def _in_tensor(self, places: torch.Tensor) -> torch.Tensor:
        """Flat indices in the tensor of flat indices among the cells side by side."""
        cells = self.beside.cells
        if cells is None:
            return places
        inner, beside = prod(self.shape[self.dim + 1 :]), len(cells)
        rows = torch.div(places, inner, rounding_mode="floor")
        outer = torch.div(rows, beside, rounding_mode="floor")
        return (outer * self.shape[self.dim] + cells[rows % beside]) * inner + places % inner


def along(values: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """``values`` as a tensor of ``dims`` dims, which differ along one of them."""
    return values.view([-1 if d == dim else 1 for d in range(dims)])
