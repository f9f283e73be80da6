"""Interpolation of a local block, dim by dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from gpudist.geometry.interpolation import InterpolationWindow

Range = tuple[int, int]
Step = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Taps:
    """Weighted sum of a few cells for each output along a dim.

    Attributes:
        dim: dim of the tensor.
        cells: index of the cell that each output reads, one tensor per tap.
        weights: weights of these cells, one tensor per tap; empty for a single tap of weight 1.
    """

    dim: int
    cells: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        first = _select(x, self.dim, self.cells[0])
        if not self.weights:
            return first
        y = first * self.weights[0]
        for cells, weight in zip(self.cells[1:], self.weights[1:], strict=True):
            y = torch.addcmul(y, _select(x, self.dim, cells), weight)
        return y


@dataclass(frozen=True)
class Resampling:
    """Interpolation steps along the dims, in a dtype with enough precision for sums."""

    steps: tuple[Step, ...]
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(self.dtype)
        for step in self.steps:
            y = step(y)
        y = y.to(x.dtype)
        return y.clone() if y is x else y


@dataclass(frozen=True)
class Interpolation:
    """Torch's interpolation of a block, reduced to the needed part of its output.

    Attributes:
        mode, size, scale_factor, align_corners: as in torch's ``interpolate``.
        outputs: slices of the needed outputs; ``None`` for all of them.
    """

    mode: str
    size: tuple[int, ...] | None = None
    scale_factor: tuple[float, ...] | None = None
    align_corners: bool | None = None
    outputs: tuple[slice, ...] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = None if self.size is None else list(self.size)
        scales = None if self.scale_factor is None else list(self.scale_factor)
        y = F.interpolate(x, size, scales, self.mode, self.align_corners)
        if self.outputs is not None:
            return y[self.outputs].contiguous()
        return y.clone() if y is x else y


def interpolating_step(
    window: InterpolationWindow,
    extent: int,
    cells: Range,
    outputs: Range,
    dim: int,
    x: torch.Tensor,
) -> Step | None:
    """Return the step from a block of global ``cells`` to global ``outputs``; ``None`` if equal."""
    read, weights = window.taps(np.arange(*outputs), extent)
    places = torch.from_numpy(read - cells[0]).to(x.device)
    if len(places) > 1:
        return Taps(dim, tuple(places), tuple(_along(torch.from_numpy(weights), dim, x)))
    if cells == outputs and np.array_equal(read[0], np.arange(*outputs)):
        return None
    return Taps(dim, (places[0],), ())


def magnification(
    mode: str, factors: Sequence[int], cells: Sequence[Range], outputs: Sequence[Range]
) -> Interpolation:
    """Return the interpolation of spatial ``cells`` to ``outputs`` by integer factors."""
    where: list[slice] = []
    is_all = True
    for factor, (first, last), (start, stop) in zip(factors, cells, outputs, strict=True):
        where.append(slice(start - first * factor, stop - first * factor))
        is_all = is_all and (start, stop) == (first * factor, last * factor)
    part = None if is_all else (slice(None), slice(None), *where)
    return Interpolation(mode, scale_factor=tuple(map(float, factors)), outputs=part)


def _select(x: torch.Tensor, dim: int, cells: torch.Tensor) -> torch.Tensor:
    if dim < x.dim() - 1:
        return x.index_select(dim, cells)
    # Along the last dim, torch's index_select is eight times slower on a CPU.
    return x.gather(dim, cells.expand(*x.shape[:-1], -1))


def _along(weights: torch.Tensor, dim: int, x: torch.Tensor) -> torch.Tensor:
    shape = (*weights.shape, *(1,) * (x.dim() - dim - 1))
    return weights.to(x.device, sum_dtype(x.dtype)).view(shape)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums: float32 for 16-bit floats, as in torch's kernels."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
