"""Reductions over ranges of cells along one dim of a tensor ``[B, C, *spatial]``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.geometry.parts import Range, coincides
from gpudist.geometry.windows import AdaptiveWindow
from gpudist.nn.parameters.parameter import empty_output
from gpudist.nn.pool.local import MAXIMUM, no_samples

_aten = torch.ops.aten
_ADAPTIVE: Any = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


class _SideBySide:
    """Concatenation of the cells of all ranges, each extended to the length of the longest.

    Args:
        shape: shape of the tensor.
        dim: dim along which the ranges lie.
        ranges: ranges of cells; at least one, and none of them empty.
        device: device of the tensor.

    Attributes:
        length: length of the longest range.
        cells: index in the tensor of each concatenated cell; a shorter range repeats its last cell.
            ``None`` if the concatenation equals the tensor.
        repeated: mask of the repeated cells; ``None`` if there are none.
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
    """Sums over ranges of cells along one dim, each divided by its own divisor.

    The autograd graph is the same on a rank without cells or ranges, in double backward as well.

    Args:
        shape, device, dtype: properties of the tensor.
        dim: dim along which the ranges lie.
        ranges: ranges of cells to sum.
        divisors: divisors of the sums, one per range.
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
        if 0 not in shape and ranges:
            self.beside = _SideBySide(shape, dim, ranges, device)
        # A sum may overflow a 16-bit float even if the mean does not.
        length = 1 if self.beside is None else self.beside.length
        factors = [length / divisor for divisor in divisors]
        factor = torch.tensor(factors, device=device, dtype=dtype)
        self.factors = along(factor, dim, len(shape))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Multiply even by 1 and without cells, because the tangent of a product depends on both
        # factors.
        return self._means(x) * self.factors

    def _means(self, x: torch.Tensor) -> torch.Tensor:
        if self.beside is None:
            return empty_output(self.output_shape, x.dtype, x)
        cells = self.beside(x)
        if self.beside.repeated is not None:
            cells = cells.masked_fill(self.beside.repeated, 0)
        return cells.unflatten(self.dim, (-1, self.beside.length)).mean(self.dim + 1)


class RangeMaximum:
    """Maxima over ranges of cells along one dim, with ties and NaN resolved as in torch's pools.

    Torch's adaptive pool computes the maxima if its windows equal the ranges.
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
        self.kernel = tuple(self.beside.length if d == dim else 1 for d in range(2, len(shape)))

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maxima, and their flat indices in the spatial dims of ``x``."""
        if self.is_adaptive or self.is_empty:
            return adaptive_maxima(x, self.output_shape)
        y, places = MAXIMUM[len(self.kernel)](self.beside(x), self.kernel)
        return y, self._in_tensor(places)

    def _in_tensor(self, places: torch.Tensor) -> torch.Tensor:
        """Convert flat indices among the concatenated cells to ones in the tensor."""
        cells = self.beside.cells
        if cells is None:
            return places
        inner, beside = prod(self.shape[self.dim + 1 :]), len(cells)
        rows = torch.div(places, inner, rounding_mode="floor")
        outer = torch.div(rows, beside, rounding_mode="floor")
        return (outer * self.shape[self.dim] + cells[rows % beside]) * inner + places % inner


def adaptive_maxima(
    x: torch.Tensor, output_shape: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's adaptive maxima, and their flat indices in the spatial dims of ``x``."""
    if 0 in output_shape:
        ones = (1,) * (len(output_shape) - 2)
        y: torch.Tensor = _ADAPTIVE[len(ones)](no_samples(x, ones), ones)
        return y.view(tuple(output_shape)), x.new_empty(output_shape, dtype=torch.int64)
    return _ADAPTIVE[x.dim() - 2](x, tuple(output_shape[2:]), return_indices=True)


def adaptive_means(x: torch.Tensor, output_shape: Sequence[int]) -> torch.Tensor:
    """Return torch's adaptive means, also if there are no outputs."""
    if 0 in output_shape:
        ones = (1,) * (len(output_shape) - 2)
        return adaptive_means(no_samples(x, ones), (-1, 1, *ones)).view(tuple(output_shape))
    if x.dim() == 3:
        return _aten._adaptive_avg_pool2d(x.unsqueeze(2), (1, output_shape[2])).squeeze(2)
    # Torch's public function is not used, because its graph differs for a block with one output.
    mean = _aten._adaptive_avg_pool2d if x.dim() == 4 else _aten._adaptive_avg_pool3d
    return mean(x, output_shape[2:])


def along(values: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    """Reshape ``values`` to ``dims`` dims, with all of them along ``dim``."""
    return values.view([-1 if d == dim else 1 for d in range(dims)])
