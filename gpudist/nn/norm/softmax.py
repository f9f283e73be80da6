"""Distributed softmax, softmin and log-softmax, along a dim that may be split."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import all_reduce_constant, move
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.partitions import require_axes, require_axis
from gpudist.ops.shape_agreement import BlockLayout
from gpudist.world.partition import CartesianPartition


def largest_of_block(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the largest cell of each line along ``dim``, which stays, as a constant."""
    cells = x.detach()
    if x.shape[dim]:
        return cells.amax(dim, keepdim=True)
    return cells.sum(dim, keepdim=True).fill_(-torch.inf)


def softmax_of_lines(
    x: torch.Tensor,
    dim: int,
    largest: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
    is_log: bool,
) -> torch.Tensor:
    """Return the softmax of a block along a dim that is split, or its logarithm.

    Args:
        x: block, not of a 16-bit dtype.
        dim: dim along which to normalize.
        largest: largest cell of each line on all workers. With it subtracted, exponentials are at
            most 1.
        total: sums one number per line over the workers, differentiably.
        is_log: whether to return the logarithm.
    """
    shifted = x - largest
    exponentials = shifted.exp()
    sums = total(exponentials.sum(dim, keepdim=True))
    return shifted - sums.log() if is_log else exponentials / sums


@layer(F.softmax, Sample((6, 7, 8)), dim=1)
class DistributedSoftmax(DistributedModule):
    """Compute ``exp(x) / sum(exp(x))`` along ``dim`` of a tensor split over ``P_x`` in any dims.

    The computation is stable, because the maximum of each line is subtracted first. Workers outside
    ``P_x`` return a clone of their input.

    Args:
        P_x: partition of input and output, one axis per dim of the tensor; blocks may be uneven or
            empty.
        dim: dim along which to normalize; must be given.

    Cost:
        Where ``dim`` is split, a maximum and a sum of one number per line among the workers along
        it, and one such sum in backward. Otherwise no communication, and torch's own kernel.

    Raises:
        PartitionError: ``dim`` is not an axis of ``P_x``.
        ShapeError: ``dim`` is None, or the input's number of dims or dtype does not fit.
    """

    _is_log = False
    _is_min = False

    def __init__(self, P_x: CartesianPartition, dim: int | None = None) -> None:
        super().__init__()
        if dim is None:
            raise ShapeError(
                f"{self._name}: dim is None, for which torch guesses a dim by the number of dims; "
                "pass a dim"
            )
        require_axis(self._name, P_x, dim)
        self.P_x, self.dim = P_x, dim
        # Only workers with cells of the same lines along the dim communicate.
        self._P_line = P_x.along([dim])
        self._agree_on(self._P_line, P_x.dim)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return input.clone()
        self._require(input)
        x = -input if self._is_min else input
        if self._P_line.size == 1:
            return (F.log_softmax if self._is_log else F.softmax)(x, self.dim)
        # Torch also computes 16-bit inputs in float32.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        own_largest = largest_of_block(wide, self.dim)
        movement: Movement = self._bindings(own_largest, self._agree_and_bind)
        largest = all_reduce_constant(own_largest, self._P_line, "max")

        def total(sums: torch.Tensor) -> torch.Tensor:
            return move((movement,), (sums,))[0]

        return softmax_of_lines(wide, self.dim, largest, total, self._is_log).to(x.dtype)

    def _require(self, x: torch.Tensor) -> None:
        if x.dim() != self.P_x.dim:
            raise ShapeError(
                f"{self._name}: the block of shape {list(x.shape)} has {x.dim()} dims, not "
                f"{self.P_x.dim}; P_x has one axis per dim of the tensor"
            )
        if not x.is_floating_point():
            raise ShapeError(f"{self._name}: the input is {x.dtype} but must be floating point")

    def _bind(self, layout: BlockLayout, x: torch.Tensor, *numbers: int) -> Movement:
        line = self._P_line
        shape = layout.decomposition.block(line.index or ()).shape
        key = ("sum along a dim", self.dim % line.dim, line.shape, layout.key)
        plan = plan_all_sum_reduce(line.rank or 0, range(line.size), shape, key)
        label = f"{self._name}: sum along dim {self.dim} on {list(self.P_x.shape)}"
        return bind(plan, line, label, layout.dtype, shape, layout.dtype)


@layer(F.softmin, Sample((6, 7, 8)), dim=1)
class DistributedSoftmin(DistributedSoftmax):
    """Softmax of ``-x`` along ``dim``; otherwise like :class:`DistributedSoftmax`.

    Args:
        P_x, dim: see :class:`DistributedSoftmax`.
    """

    _is_min = True


@layer(F.softmax, Sample((2, 4, 9, 8)))
class DistributedSoftmax2d(DistributedSoftmax):
    """Softmax along the channels of images ``[B, C, H, W]`` or ``[C, H, W]``.

    Otherwise like :class:`DistributedSoftmax`.

    Args:
        P_x: partition of input and output, with 3 or 4 axes.

    Raises:
        PartitionError: ``P_x`` does not have 3 or 4 axes.
    """

    def __init__(self, P_x: CartesianPartition) -> None:
        require_axes(
            "DistributedSoftmax2d",
            P_x,
            P_x.dim in (3, 4),
            "axes for channels, height and width, with or without one for the batch in front",
        )
        super().__init__(P_x, -3)


@layer(F.log_softmax, Sample((6, 7, 8)), dim=1)
class DistributedLogSoftmax(DistributedSoftmax):
    """Compute ``x - log(sum(exp(x)))`` along ``dim``; otherwise like :class:`DistributedSoftmax`.

    Args:
        P_x, dim: see :class:`DistributedSoftmax`.
    """

    _is_log = True
