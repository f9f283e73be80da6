"""Normalizing a block of a cut tensor by moments taken over all blocks that share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch

from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import is_eager, move
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.ops.agreement import Layout
from gpudist.world.partition import CartesianPartition

if TYPE_CHECKING:
    from gpudist._native import NormLines


class Composed(NamedTuple):
    """A normalized block, and what it was normalized by: statistics, in float64.

    Attributes:
        y: the block, in the dtype of the input.
        own_mean: what was subtracted first, of each line of values that are summed in the block, in
            the dtype of sums over the block; ``None`` here and below where no mean is subtracted.
        totals: the sums over all workers that it was normalized by, as they move.
        mean: of each statistic.
        error: of each line, the mean about ``own_mean``.
        inverse: of each line, one over the standard deviation.
        parameters: on this worker.
    """

    y: torch.Tensor
    own_mean: torch.Tensor | None
    totals: torch.Tensor
    mean: torch.Tensor | None
    error: torch.Tensor | None
    inverse: torch.Tensor
    parameters: list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class Normalization:
    """The normalization of a block of one shape by the mean and variance of values on all workers.

    Each block first subtracts means of its own, so that sums of squares keep their digits where a
    mean is large. Sums over the block are in its dtype, in float32 for 16-bit ones; sums over
    workers, and what follows from them, are in float64: of a mean of 1e4 standard deviations, the
    variance keeps 8 digits.

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
        native: what the native core knows of it, by the dtype of the block.
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
    native: dict[torch.dtype, NormLines] = field(default_factory=dict)

    def compose(
        self,
        x: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> Composed:
        """Normalize the block ``x``, of any size, by a composition of differentiable operators.

        Collective over the movements.

        Args:
            x: the block.
            parameters: the weight and the bias, or the weight, or none, as this worker holds them.
        """
        rest, own_mean = self.centred(x)
        offset = None if own_mean is None else own_mean.double()
        totals, moved = self.move(self._sums(rest, offset), parameters)
        mean, variance = self.moments(totals)
        inverse = self.of_lines(torch.rsqrt(variance + self.eps), x.dim())
        error = None
        if mean is not None and offset is not None:
            error = self.of_lines(mean, x.dim()) - offset
        y = self._scaled(rest, error, inverse, moved).to(x.dtype)
        return Composed(y, own_mean, totals, mean, error, inverse, moved)

    def centred(
        self, x: torch.Tensor, own_mean: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``x`` without the means of its lines in the block, taken here unless given; and these."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.subtracts_mean:
            return wide, None
        if own_mean is None:
            own_mean = self.sum(wide.detach()) / max(1, self.line_cells(x))
        return wide - own_mean, own_mean

    def line_cells(self, x: torch.Tensor) -> int:
        """How many values of the block are summed in each line."""
        return prod([x.shape[d] for d in self.dims])

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

    def gradients(
        self, inputs: Sequence[torch.Tensor], gradient: torch.Tensor, needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gradients of the block and the parameters, as differentiable functions of all given."""
        x, *parameters = inputs
        y = self.compose(x, parameters).y
        needed = [t for t, needed in zip(inputs, needs, strict=True) if needed]
        found = iter(torch.autograd.grad(y, needed, gradient, create_graph=True))
        return [next(found) if needed else None for needed in needs]

    def move_gradients(
        self,
        of_sums: torch.Tensor,
        of_parameters: Sequence[torch.Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """What all workers' parts are together, where it is needed: one group of messages."""
        movements = [self.total, *self.parameters]
        parts = [of_sums, *of_parameters[: len(movements) - 1]]
        found = [part if needed else None for needed, part in zip(needs, parts, strict=True)]
        moving = [
            (i, movement.T, part.to(movement.dtype))
            for i, (movement, part) in enumerate(zip(movements, found, strict=True))
            if movement is not None and part is not None
        ]
        if moving:
            moved = move([m for _, m, _ in moving], [part for _, _, part in moving])
            for (i, _, _), part in zip(moving, moved, strict=True):
                found[i] = part
        return found[0], found[1:]

    def sums_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the sums of a block of ``shape``, as they move."""
        if self.groups is not None:
            return shape[0], self.group_count, 2
        lines = [1 if d in self.dims else extent for d, extent in enumerate(shape)]
        return *lines, 2 if self.subtracts_mean else 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of each line. Without dims, torch would sum over all."""
        return x.sum(self.dims, keepdim=True) if self.dims else x

    def _sums(self, rest: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        """This block's sums of ``rest + offset``, if means are taken, and of its square."""
        squares = self.sum(rest.square()).double()
        if offset is None:
            return squares.unsqueeze(-1)
        plain = self.sum(rest).double()
        moved = self.line_cells(rest) * offset
        sums = torch.stack([plain + moved, squares + offset * (2 * plain + moved)], -1)
        return self.of_statistics(sums)

    def moments(self, totals: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Mean, if it is taken, and variance of each statistic."""
        means = totals / max(1, self.cells)
        if not self.subtracts_mean:
            return None, means[..., 0]
        mean = means[..., 0]
        # Of equal values far off zero the difference may be less than zero.
        return mean, (means[..., 1] - mean.square()).clamp(min=0)

    def of_statistics(self, sums: torch.Tensor) -> torch.Tensor:
        """Two sums of each line, added up for each statistic."""
        if self.groups is None:
            return sums
        sums = sums.reshape(*sums.shape[:2], 2)
        return sums.new_zeros(len(sums), self.group_count, 2).index_add(1, self.groups, sums)

    def of_lines(self, statistics: torch.Tensor, dims: int) -> torch.Tensor:
        """What belongs to each statistic, for each line of a block of so many dims."""
        if self.groups is None:
            return statistics
        chosen = statistics.index_select(1, self.groups)
        return chosen.view(*chosen.shape[:2], *(1,) * (dims - 2), *chosen.shape[2:])

    def _scaled(
        self,
        rest: torch.Tensor,
        error: torch.Tensor | None,
        inverse: torch.Tensor,
        parameters: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """``(rest - error) * inverse``, with the weight and bias, in few passes over the block."""
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
        in_place = self.subtracts_mean and not torch.is_grad_enabled()
        factor = scale.to(rest.dtype)
        y = rest.mul_(factor) if in_place else rest * factor
        if shift is not None:
            y = _added(y, shift.to(rest.dtype))
        if weight is not None:
            y = y * weight.to(rest.dtype)
        return y if bias is None else _added(y, bias.to(rest.dtype))


def _added(y: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    """Their sum, in the memory of ``y`` unless somebody may have kept ``y``."""
    return y.add_(term) if is_eager(y) else y + term


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
