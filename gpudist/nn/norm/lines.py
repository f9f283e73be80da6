"""Normalization of contiguous float32 blocks on a CPU by the native core, in few passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from gpudist import recycling
from gpudist.exchange.autograd import is_eager
from gpudist.native import native as _native
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.nn.norm.normalization import Normalization, Parameters
from gpudist.nn.norm.passes import BoundNorm

if TYPE_CHECKING:
    from gpudist._native import NormLines

# The native core uses one thread; with several threads, torch's kernels are as fast.
MOST_THREADS = 4
# For shorter lines of channels, the overhead per line exceeds the work per cell.
_FEWEST_CELLS = 8


def fits(normalization: Normalization, x: torch.Tensor, parameters: Parameters) -> bool:
    """Return whether the native core can normalize this block, and is faster than torch.

    A block without data stands for one on a CPU.
    """
    return (
        is_eager(x)
        and _native is not None
        and normalization.total is not None
        and (suits_cpu(x) or x.is_meta)
        and x.dtype == torch.float32
        and x.numel() > 0
        and x.is_contiguous()
        and all([p is not None and p.dtype == x.dtype for p in parameters])
        and (not normalization.per_channel or prod(x.shape[2:]) >= _FEWEST_CELLS)
        and torch.get_num_threads() <= MOST_THREADS
    )


def bound_norm(
    normalization: Normalization, x: torch.Tensor, parameters: Parameters
) -> BoundNorm | None:
    """Return the normalization of this block, ``None`` unless it :func:`fits`.

    Cost:
        Two passes over the block in forward and two in backward; no memory of its size except the
        output, and the gradient in backward.
    """
    if not fits(normalization, x, parameters):
        return None
    bound = normalization.native.get(x.stride())
    if bound is None:
        native = None if x.is_meta else _Passes(_bind_lines(normalization, x))
        bound = normalization.native[x.stride()] = BoundNorm(
            normalization, x, parameters, x.dtype, native, False, _recycled_like
        )
    return bound


def _recycled_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return recycling.empty(x.shape, x.dtype)


class _Passes:
    """Passes with the arguments of :class:`DeviceNorm`, of which they need a few."""

    workspace = 0

    def __init__(self, lines: NormLines) -> None:
        self._lines = lines

    def sums(self, x: int, shifts: int, sums: int, *rest: int) -> None:
        self._lines.sums(x, sums)

    def normalize(
        self, x: int, totals: int, shifts: int, parameters: Any, y: int, *rest: Any
    ) -> None:
        weight, bias, _ = parameters
        self._lines.normalize(x, totals, weight, bias, y)

    def gradient_sums(
        self, gradient: int, x: int, totals: int, shifts: int, parameters: Any, of_sums: int,
        of_parameters: Any, *rest: int,
    ) -> None:  # fmt: skip
        of_weight, of_bias, _ = of_parameters
        self._lines.gradient_sums(gradient, x, totals, parameters[0], of_sums, of_weight, of_bias)

    def gradient(
        self, gradient: int, x: int, totals: int, shifts: int, of_totals: int, parameters: Any,
        of_x: int, *rest: int,
    ) -> None:  # fmt: skip
        self._lines.gradient(gradient, x, totals, of_totals, parameters[0], of_x)


def _bind_lines(normalization: Normalization, x: torch.Tensor) -> NormLines:
    first = 2 if normalization.per_channel else normalization.dims[0]
    return _native.NormLines(
        lines=prod(x.shape[:first]),
        channels=x.shape[1] if normalization.per_channel else 1,
        cells=prod(x.shape[first:]),
        statistic_of=_statistics_of_lines(normalization, x.shape),
        statistics=prod(normalization.sums_shape(x.shape)[:-1]),
        count=max(1, normalization.cells),
        eps=normalization.eps,
        subtracts_mean=normalization.subtracts_mean,
        parameters_of_cells=not normalization.per_channel,
    )


def _statistics_of_lines(normalization: Normalization, shape: Sequence[int]) -> list[int]:
    if normalization.groups is not None:
        groups, count = normalization.groups.tolist(), normalization.group_count
        return [sample * count + group for sample in range(shape[0]) for group in groups]
    if normalization.per_channel and 0 in normalization.dims:
        return list(range(shape[1])) * shape[0]
    return []
