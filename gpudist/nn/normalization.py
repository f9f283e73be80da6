"""Normalizing a block of a cut tensor by moments taken over all blocks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from gpudist.autograd import move
from gpudist.exchange import Movement, bind
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.ops.agreement import Layout
from gpudist.partition import CartesianPartition


class Normalized(NamedTuple):
    """A normalized block, and the moments it was normalized by, as constants.

    Attributes:
        y: the block, in the dtype of the input.
        mean, variance: one per statistic, in float64; no mean where it is not subtracted.
    """

    y: torch.Tensor
    mean: torch.Tensor | None
    variance: torch.Tensor


@dataclass(frozen=True, eq=False)
class Normalization:
    """The normalization of a block of one shape by the mean and variance of values on all workers.

    Each block first subtracts means of its own, so that sums of squares keep their digits where a
    mean is large. Sums over the block are in its dtype, in float32 for 16-bit ones; sums over
    workers, about a shift that all of them know, and what follows from them are in float64.

    Attributes:
        dims: of the block, over which values are summed.
        cells: global number of values in each average.
        eps: added to the variance.
        subtracts_mean: whether the mean is subtracted.
        per_channel: parameters are one number per channel, dim 1; else as large as the last dims.
        groups: the statistic of each channel of the block, where channels of a sample share one.
        group_count: number of those statistics of a sample.
        total: the sum over workers of the block's sums, ``None`` where no other worker has a part.
        parameters: movements of the weight and the bias to this worker, ``None`` for those that
            every worker has.
    """

    dims: tuple[int, ...]
    cells: int
    eps: float
    subtracts_mean: bool = True
    per_channel: bool = True
    groups: torch.Tensor | None = None
    group_count: int = 0
    total: Movement | None = None
    parameters: tuple[Movement | None, ...] = ()

    def __call__(
        self,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
        shift: torch.Tensor | float = 0.0,
    ) -> Normalized:
        """Normalize the block ``x``, of any size; differentiable. Collective over the movements.

        Args:
            x: the block.
            parameters: the weight and the bias, or the weight, or none, as this worker holds them.
            shift: close to the means, if something close is known; the same on all workers.
        """
        rest = x.to(torch.promote_types(x.dtype, torch.float32))
        offset = None
        if self.subtracts_mean:
            values = prod(x.shape[d] for d in self.dims)
            own_mean = self._sum(rest.detach()) / max(1, values)
            rest = rest - own_mean
            offset = own_mean.double() - shift
        totals, moved = self.move(self._sums(rest, offset), parameters)
        mean, variance = self._moments(totals)
        inverse = self._of_each_line(torch.rsqrt(variance + self.eps), x)
        error = None if mean is None or offset is None else self._of_each_line(mean, x) - offset
        y = self._scaled(rest, error, inverse, moved).to(x.dtype)
        return Normalized(y, None if mean is None else mean.detach() + shift, variance.detach())

    def move(
        self, sums: torch.Tensor | None, parameters: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The sums over all workers, and the parameters on this one, as one group of messages."""
        movements = (self.total if sums is not None else None, *self.parameters)
        tensors = [sums, *parameters]
        moving = [i for i, movement in enumerate(movements) if movement is not None]
        if moving:
            chosen = [movement for movement in movements if movement is not None]
            moved = move(chosen, [tensors[i] for i in moving])  # pyright: ignore
            for i, tensor in zip(moving, moved, strict=True):
                tensors[i] = tensor
        return tensors[0], tensors[1:]  # pyright: ignore

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        # Without dims, torch sums over all.
        return x.sum(self.dims, keepdim=True) if self.dims else x

    def _sums(self, rest: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        """This block's sums of ``rest + offset``, if means are taken, and of its square."""
        squares = self._sum(rest.square()).double()
        if offset is None:
            return squares.unsqueeze(-1)
        plain = self._sum(rest).double()
        moved = prod(rest.shape[d] for d in self.dims) * offset
        sums = torch.stack([plain + moved, squares + offset * (2 * plain + moved)], -1)
        if self.groups is None:
            return sums
        sums = sums.reshape(*sums.shape[:2], 2)
        return sums.new_zeros(len(sums), self.group_count, 2).index_add(1, self.groups, sums)

    def _moments(self, totals: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Mean, about the shift, and variance of each statistic."""
        means = totals / max(1, self.cells)
        if not self.subtracts_mean:
            return None, means[..., 0]
        mean = means[..., 0]
        # Of equal values far off the shift the difference may be less than zero.
        return mean, (means[..., 1] - mean.square()).clamp(min=0)

    def _of_each_line(self, statistics: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The statistic of each line of values that were summed."""
        if self.groups is None:
            return statistics
        chosen = statistics.index_select(1, self.groups)
        return chosen.view(*chosen.shape, *(1,) * (x.dim() - 2))

    def _scaled(
        self,
        rest: torch.Tensor,
        error: torch.Tensor | None,
        inverse: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """``(rest - error) * inverse``, with the weight and bias; few passes over the block."""
        weight, bias = [*parameters, None, None][:2]
        scale, shift = inverse, None if error is None else -error * inverse
        if self.per_channel:
            trailing = (1,) * (rest.dim() - 2)
            if weight is not None:
                weight = weight.double().view(-1, *trailing)
                scale, shift = scale * weight, None if shift is None else shift * weight
            if bias is not None:
                bias = bias.double().view(-1, *trailing)
                shift = bias if shift is None else shift + bias
            weight = bias = None
        y = rest * scale.to(rest.dtype)
        if shift is not None:
            y = y.add_(shift.to(rest.dtype))
        if weight is not None:
            y = y * weight.to(rest.dtype)
        return y if bias is None else y.add_(bias.to(rest.dtype))


def bind_total(
    P_x: CartesianPartition, axes: Sequence[int], layout: Layout, shape: Sequence[int]
) -> Movement | None:
    """The all-sum of sums of ``shape`` over ``axes``; ``None`` if these have one worker each.

    ``layout`` is that of the normalized tensor, which the shapes on all workers follow from.
    """
    axes = [axis for axis in axes if P_x.shape[axis] > 1]
    if not axes:
        return None
    assert P_x.rank is not None
    members = [P_x.rank_of(world_rank) for world_rank in P_x.along(axes).ranks]
    key = ("moments", tuple(axes), P_x.digest, layout.key)
    plan = plan_all_sum_reduce(P_x.rank, members, tuple(shape), key)
    label = f"moments over axes {axes} of {list(P_x.shape)}"
    return bind(plan, P_x, label, torch.float64, tuple(shape), torch.float64)
