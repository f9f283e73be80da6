"""Normalization of a block of a split tensor by moments over all blocks that share them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from gpudist.cache import Cache
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import is_eager, move
from gpudist.geometry.boxes import Box
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.nn.norm.strides import gradient_as_laid_out
from gpudist.world.partition import CartesianPartition

Parameters = Sequence[torch.Tensor | None]


class Composed(NamedTuple):
    """Normalized block, and the statistics used to normalize it, in float64.

    Attributes:
        y: normalized block, in the dtype of the input.
        totals: sums over all workers of values minus their shift, in the layout in which they are
            sent.
        shift: shift of each statistic; ``None`` for 0.
        own_mean: mean of the block's cells in each line, subtracted first, in the dtype of sums
            over the block. ``None``, like the next three, if no mean is subtracted.
        offset: ``own_mean`` minus the shift of each line.
        mean: mean of each statistic, minus its shift.
        error: mean of each line minus ``own_mean``.
        inverse: reciprocal of the standard deviation of each line.
        parameters: parameters used on this worker.
    """

    y: torch.Tensor
    totals: torch.Tensor
    shift: torch.Tensor | None
    own_mean: torch.Tensor | None
    offset: torch.Tensor | None
    mean: torch.Tensor | None
    error: torch.Tensor | None
    inverse: torch.Tensor
    parameters: Sequence[torch.Tensor | None]


class Running(NamedTuple):
    """Running moments of each channel, to be updated.

    Attributes:
        mean, variance: running moments.
        momentum: share of the new moments.
        batches: number of batches, whose reciprocal is the share instead.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    momentum: float
    batches: torch.Tensor | None = None

    def update(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move the running moments towards those of a batch."""
        batches = self.batches
        factor = self.momentum if batches is None else batches.double().reciprocal()
        for running, seen in ((self.mean, mean), (self.variance, variance)):
            wide = running.double()
            running.copy_(wide + (seen.view(running.shape) - wide) * factor)


@dataclass(frozen=True, eq=False)
class Normalization:
    """Normalization of a block of one shape by the mean and variance of values on all workers.

    Each block first subtracts its own means, so that sums of squares remain precise if a mean is
    large. Sums over the block have its dtype, or float32 for 16-bit dtypes; sums over workers, and
    the statistics computed from them, are float64. With a mean of 1e4 standard deviations, the
    variance has 8 correct digits, more than a float32 block can use. Values of a float64 block are
    summed minus their mean, which takes one more group of messages.

    A line is the set of cells of the block that are summed into one number.

    Attributes:
        dims: dims of the block over which values are summed.
        eps: number added to the variance.
        subtracts_mean: whether the mean is subtracted.
        per_channel: parameters have one number per channel (dim 1); otherwise they have the shape
            of the last dims.
        group_count: number of groups of channels, which share statistics: in the global tensor
            before :meth:`bind`, in the block after it; 0 if channels share none.
        cells: global number of values in each average.
        groups: index of the group of each channel of the block.
        group_size, group_offset: channel ``c`` belongs to group
            ``(c + group_offset) // group_size``.
        device_library: path of a replacement for the GPU's runtime in tests.
        total: sum of the block's sums over workers; ``None`` if no other worker contributes.
        parameters: movements of the weight and the bias to this worker; ``None`` for parameters
            that every worker holds; may be empty if none moves.
        samples: global number of samples, if moments are averaged over them.
        batch: sum of the averages over workers; ``None`` if samples are not split.
        native: normalizations by the native core, by layouts and dtypes; ``False`` if it has none.
    """

    dims: tuple[int, ...]
    eps: float
    subtracts_mean: bool = True
    per_channel: bool = True
    group_count: int = 0
    cells: int = 0
    groups: torch.Tensor | None = None
    group_size: int = 1
    group_offset: int = 0
    device_library: str = ""
    total: Movement | None = None
    parameters: tuple[Movement | None, ...] = ()
    samples: int = 0
    batch: Movement | None = None
    native: Cache[object, Any] = field(default_factory=Cache)

    def bind(
        self,
        P: CartesianPartition,
        split_by: Sequence[int],
        box: Box,
        shape: Sequence[int],
        channels: Iterable[tuple[int, int]],
        key: object,
        parameters: tuple[Movement | None, ...] = (),
    ) -> Normalization:
        """Return the normalization bound to a block.

        Args:
            P: workers that hold the tensor.
            split_by: dim of the tensor that each axis of ``P`` splits, -1 for none.
            box: global cells of this worker's block.
            shape: global shape of the tensor.
            channels: ranges of channels of all blocks, if channels share statistics.
            key: identification of the blocks, the same on all ranks.
            parameters: movements of the parameters.
        """
        cells, summed = prod([shape[d] for d in self.dims]), set(self.dims)
        groups, count, size, offset = None, self.group_count, 1, 0
        if count:
            size, (start, stop) = shape[1] // count, (box.start[1], box.stop[1])
            cells, first = cells * size, 0
            if any(end % size for ends in channels for end in ends):
                summed.add(1)
            else:
                first, count = start // size, (stop - start) // size
            groups = torch.arange(start, stop, device=P.device) // size - first
            offset = start - first * size
        bound = replace(
            self, cells=cells, groups=groups, group_count=count, group_size=size,
            group_offset=offset, device_library=P.wire.device_library, parameters=parameters,
            native=Cache(),
        )  # fmt: skip
        axes = [axis for axis, dim in enumerate(split_by) if dim in summed]
        return replace(bound, total=bind_total(P, axes, key, bound.sums_shape(box.shape)))

    def compose(
        self,
        x: torch.Tensor,
        parameters: Parameters,
    ) -> Composed:
        """Normalize the block ``x``, of any size, as a composition of differentiable operators.

        Collective over the movements.

        Args:
            x: the block.
            parameters: this worker's weight and bias, or as many of them as there are.
        """
        rest, own_mean = self.subtract_own_mean(x)
        offset = None if own_mean is None else own_mean.double()
        shift = None
        if x.dtype == torch.float64 and offset is not None:
            sums = self.sum_over_workers(self._sums(rest.detach(), offset))
            shift = sums[..., 0] / max(1, self.cells)
            offset = offset - self.of_lines(shift, x.dim())
        totals, moved = self.move(self._sums(rest, offset), parameters)
        mean, variance = self.moments(totals)
        inverse = self.of_lines(torch.rsqrt(variance + self.eps), x.dim())
        error = None
        if mean is not None and offset is not None:
            error = self.of_lines(mean, x.dim()) - offset
        y = self._scale(rest, error, inverse, moved).to(x.dtype)
        return Composed(y, totals, shift, own_mean, offset, mean, error, inverse, moved)

    def subtract_own_mean(
        self, x: torch.Tensor, own_mean: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``x`` minus the block's mean of each line, and that mean.

        The mean is ``own_mean``, or computed here by default.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if not self.subtracts_mean:
            return wide, None
        if own_mean is None:
            own_mean = self.sum(wide.detach()) / max(1, self.line_cells(x))
        return wide - own_mean, own_mean

    def line_cells(self, x: torch.Tensor) -> int:
        """Return the number of values of the block that are summed in each line."""
        return prod([x.shape[d] for d in self.dims])

    def move(
        self, sums: torch.Tensor | None, parameters: Parameters
    ) -> tuple[torch.Tensor, list[Any]]:
        """Return the sums over all workers and the parameters, moved in one group of messages."""
        unmoved = (None,) * (len(parameters) - len(self.parameters))
        movements = (self.total if sums is not None else None, *self.parameters, *unmoved)
        tensors: list[Any] = [sums, *parameters]
        if any(movements):
            chosen = [movement for movement in movements if movement is not None]
            moved = iter(move(chosen, list(compress(tensors, movements))))
            pairs = zip(movements, tensors, strict=True)
            tensors = [x if movement is None else next(moved) for movement, x in pairs]
        return tensors[0], tensors[1:]

    def move_gradients(
        self,
        of_sums: torch.Tensor,
        of_parameters: Sequence[torch.Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
        """Sum the needed gradients over all workers, in one group of messages."""
        unmoved = (None,) * (len(needs) - 1 - len(self.parameters))
        movements = [self.total, *self.parameters, *unmoved]
        parts = [of_sums, *of_parameters[: len(needs) - 1]]
        gradients = [part if needed else None for needed, part in zip(needs, parts, strict=True)]
        moving = [
            (i, movement.T, part.to(movement.dtype))
            for i, (movement, part) in enumerate(zip(movements, gradients, strict=True))
            if movement is not None and part is not None
        ]
        if moving:
            moved = move([m for _, m, _ in moving], [part for _, _, part in moving])
            for (i, _, _), part in zip(moving, moved, strict=True):
                gradients[i] = part
        return gradients[0], gradients[1:]

    def alone(self, x: torch.Tensor, parameters: Parameters) -> torch.Tensor:
        """Normalize a block with cells that shares no statistics, by torch's kernel."""
        weight, bias = [*self.move(None, parameters)[1], None, None][:2]
        if not self.per_channel:
            shape = x.shape[self.dims[0] :]
            if self.subtracts_mean:
                return F.layer_norm(x, shape, weight, bias, self.eps)
            return F.rms_norm(x, shape, weight, self.eps)
        on = torch.backends.cudnn.enabled
        if self.groups is not None:
            # Unlike F.group_norm, it does not require several values per group in the block.
            return torch.group_norm(x, self.group_count, weight, bias, self.eps, on)
        norm = torch.batch_norm if 0 in self.dims else torch.instance_norm
        return gradient_as_laid_out(norm(x, weight, bias, None, None, True, 0.0, self.eps, on))

    def sums_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in which the sums of a block of ``shape`` are sent."""
        if self.groups is not None:
            return shape[0], self.group_count, 2
        lines = [1 if d in self.dims else extent for d, extent in enumerate(shape)]
        return *lines, 2 if self.subtracts_mean else 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of each line. Without dims, torch would sum over all of them."""
        return x.sum(self.dims, keepdim=True) if self.dims else x

    def _sums(self, rest: torch.Tensor, offset: torch.Tensor | None) -> torch.Tensor:
        """Return sums of ``rest + offset``, if means are subtracted, and of its square."""
        squares = self.sum(rest.square()).double()
        if offset is None:
            return squares.unsqueeze(-1)
        plain = self.sum(rest).double()
        moved = self.line_cells(rest) * offset
        sums = torch.stack([plain + moved, squares + offset * (2 * plain + moved)], -1)
        return self.of_statistics(sums)

    def sum_over_workers(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums over all workers, moved alone."""
        return sums if self.total is None else move((self.total,), (sums,))[0]

    def moments(
        self, totals: torch.Tensor, shift: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return the mean of each statistic, if it is subtracted, and the variance.

        Args:
            totals: sums over all workers of values minus ``shift``.
            shift: shift of each statistic; 0 by default.
        """
        means = totals / max(1, self.cells)
        if not self.subtracts_mean:
            return None, means[..., 0]
        mean = means[..., 0]
        # For equal values far from zero, rounding may make the difference negative.
        variance = (means[..., 1] - mean.square()).clamp(min=0)
        return mean if shift is None else mean + shift, variance

    def of_statistics(self, sums: torch.Tensor) -> torch.Tensor:
        """Add the two sums of all lines that share a statistic."""
        if self.groups is None:
            return sums
        sums = sums.reshape(*sums.shape[:2], 2)
        return sums.new_zeros(len(sums), self.group_count, 2).index_add(1, self.groups, sums)

    def of_lines(self, statistics: torch.Tensor, dims: int) -> torch.Tensor:
        """Return the statistic of each line of a block with ``dims`` dims."""
        if self.groups is None:
            return statistics
        chosen = statistics.index_select(1, self.groups)
        return chosen.view(*chosen.shape[:2], *(1,) * (dims - 2), *chosen.shape[2:])

    def _scale(
        self,
        rest: torch.Tensor,
        error: torch.Tensor | None,
        inverse: torch.Tensor,
        parameters: Parameters,
    ) -> torch.Tensor:
        """Return ``(rest - error) * inverse``, with weight and bias, in few passes."""
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
            y = _add(y, shift.to(rest.dtype))
        if weight is not None:
            y = y * weight.to(rest.dtype)
        return y if bias is None else _add(y, bias.to(rest.dtype))


def _add(y: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
    # Works in place, unless a graph may have saved ``y``.
    return y.add_(term) if is_eager(y) else y + term


def bind_total(
    P: CartesianPartition, axes: Sequence[int], key: object, shape: Sequence[int]
) -> Movement | None:
    """Bind the all-sum of sums of ``shape`` over ``axes``; ``None`` if these have one worker each.

    ``key`` identifies the blocks of the normalized tensor, on all ranks alike.
    """
    axes = [axis for axis in axes if P.shape[axis] > 1]
    if not axes:
        return None
    members = [P.rank_of(world_rank) for world_rank in P.along(axes).ranks]
    whole = ("moments", tuple(axes), P.digest, key)
    plan = plan_all_sum_reduce(P.plan_rank, members, tuple(shape), whole)
    label = f"moments over axes {axes} of {list(P.shape)}"
    return bind(plan, P, label, torch.float64, tuple(shape), torch.float64)
