"""Normalization of contiguous float32 blocks on a CPU by the native core, in few passes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from gpudist import recycling
from gpudist.exchange.autograd import is_eager
from gpudist.native import native as _native
from gpudist.nn.kernel_choice import suits_cpu
from gpudist.nn.norm.normalization import Normalization, Parameters, Summing

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


class ByLines(Summing):
    """Normalization of one block by the native core; requires :func:`fits`.

    Adjoint:
        The gradient is computed from the block, the sums and the weight.

    Cost:
        Two passes over the block in forward and two in backward; no memory of its size except the
        output, and the gradient in backward.
    """

    def forward(
        self, x: torch.Tensor, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        lines = _lines_of(self.normalization, x)
        sums = torch.empty(self.normalization.sums_shape(x.shape), dtype=torch.float64)
        lines.sums(x.data_ptr(), sums.data_ptr())
        self.totals, moved = self.normalization.move(sums, parameters)
        moved = [parameter.contiguous() for parameter in moved]
        y = recycling.empty(x.shape, x.dtype)
        weight, bias = [*map(_address, moved), 0, 0][:2]
        lines.normalize(x.data_ptr(), self.totals.data_ptr(), weight, bias, y.data_ptr())
        # Backward does not need the bias.
        return y, [self.totals, *moved[:1]]

    def backward(
        self,
        gradient: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[torch.Tensor],
        needs: Sequence[bool],
    ) -> list[torch.Tensor | None]:
        x, totals, weight = inputs[0], kept[0], kept[1] if kept[1:] else None
        gradient = gradient.contiguous()
        lines, of_sums = _lines_of(self.normalization, x), torch.empty_like(totals)
        own_sums = [
            torch.empty_like(kept[1]) if needed and kept[1:] else None for needed in needs[1:]
        ]
        at_x, at_totals, at_weight = x.data_ptr(), totals.data_ptr(), _address(weight)
        of_weight, of_bias = [*map(_address, own_sums), 0, 0][:2]
        lines.gradient_sums(
            gradient.data_ptr(), at_x, at_totals, at_weight, of_sums.data_ptr(), of_weight, of_bias
        )
        of_totals, of_parameters = self.normalization.move_gradients(of_sums, own_sums, needs)
        of_x = None
        if of_totals is not None:
            of_x = recycling.empty(x.shape, x.dtype)
            lines.gradient(
                gradient.data_ptr(),
                at_x,
                at_totals,
                of_totals.data_ptr(),
                at_weight,
                of_x.data_ptr(),
            )
        return [of_x, *of_parameters]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _lines_of(normalization: Normalization, x: torch.Tensor) -> NormLines:
    lines = normalization.native.get("lines")
    if lines is None:
        lines = normalization.native["lines"] = _bind_lines(normalization, x)
    return lines


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
