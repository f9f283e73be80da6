"""Distributed softmax, softmin and log-softmax, along a dim that may be split."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpudist.errors import PartitionError, ShapeError
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import all_reduce_constant, move
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.nn.distributed_module import DistributedModule
from gpudist.nn.layer_table import Sample, layer
from gpudist.ops.bound import Bound
from gpudist.ops.shape_agreement import ShapeAgreement
from gpudist.world.partition import CartesianPartition


class _AlongDim(DistributedModule):
    """Base class: the maximum and a sum along one dim of a tensor on ``P_x``."""

    def __init__(self, P_x: CartesianPartition, dim: int | None) -> None:
        super().__init__()
        self._name = type(self).__name__
        if dim is None:
            raise ShapeError(
                f"{self._name}: dim is None, for which torch guesses a dim by the number of dims; "
                "pass a dim"
            )
        if not -P_x.dim <= dim < P_x.dim:
            raise PartitionError(
                f"{self._name}: dim {dim} is not one of the {P_x.dim} axes of P_x of shape "
                f"{list(P_x.shape)}; give it one axis per dim of the tensor"
            )
        self.P_x, self.dim = P_x, dim
        # Only workers with cells of the same lines along the dim communicate.
        self._P_line = P_x.along([dim])
        self._agreement = ShapeAgreement(self._name, self._P_line, self._P_line, P_x.dim)
        self._sum_movement = Bound[Movement]("static")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return input.clone()
        self._require(input)
        if self._P_line.size == 1:
            return self._whole(input)
        # Torch also computes 16-bit inputs in float32.
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        return self._split(x).to(input.dtype)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _require(self, x: torch.Tensor) -> None:
        if x.dim() != self.P_x.dim:
            raise ShapeError(
                f"{self._name}: the block of shape {list(x.shape)} has {x.dim()} dims, not "
                f"{self.P_x.dim}; P_x has one axis per dim of the tensor"
            )
        if not x.is_floating_point():
            raise ShapeError(f"{self._name}: the input is {x.dtype} but must be floating point")

    def _shifted(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``x`` minus the maximum of its line, its exponential, and the sum of these.

        With the maximum subtracted, exponentials are at most 1.
        """
        cells = x.detach()
        if x.shape[self.dim]:
            largest = cells.amax(self.dim, keepdim=True)
        else:
            largest = cells.sum(self.dim, keepdim=True).fill_(-torch.inf)
        movement = self._sum_movement(largest, self._bind_sum)
        shifted = x - all_reduce_constant(largest, self._P_line, "max")
        exponentials = shifted.exp()
        sums = move((movement,), (exponentials.sum(self.dim, keepdim=True),))[0]
        return shifted, exponentials, sums

    def _bind_sum(self, largest: torch.Tensor) -> Movement:
        layout, line = self._agreement(largest), self._P_line
        shape = layout.decomposition.block(line.index or ()).shape
        key = ("sum along a dim", self.dim % line.dim, line.shape, layout.key)
        plan = plan_all_sum_reduce(line.rank or 0, range(line.size), shape, key)
        label = f"{self._name}: sum along dim {self.dim} on {list(self.P_x.shape)}"
        return bind(plan, line, label, layout.dtype, shape, layout.dtype)


@layer(F.softmax, Sample((6, 7, 8)), dim=1)
class DistributedSoftmax(_AlongDim):
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

    def __init__(self, P_x: CartesianPartition, dim: int | None = None) -> None:
        super().__init__(P_x, dim)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x, self.dim)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        _, exponentials, sums = self._shifted(x)
        return exponentials / sums


@layer(F.softmin, Sample((6, 7, 8)), dim=1)
class DistributedSoftmin(DistributedSoftmax):
    """Softmax of ``-x`` along ``dim``; otherwise like :class:`DistributedSoftmax`.

    Args:
        P_x, dim: see :class:`DistributedSoftmax`.
    """

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmin(x, self.dim)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return super()._split(-x)


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
        if P_x.dim not in (3, 4):
            raise PartitionError(
                f"DistributedSoftmax2d: P_x has shape {list(P_x.shape)} but needs axes for "
                "channels, height and width, with or without one for the batch in front"
            )
        super().__init__(P_x, -3)


@layer(F.log_softmax, Sample((6, 7, 8)), dim=1)
class DistributedLogSoftmax(_AlongDim):
    """Compute ``x - log(sum(exp(x)))`` along ``dim``; otherwise like :class:`DistributedSoftmax`.

    Args:
        P_x, dim: see :class:`DistributedSoftmax`.
    """

    def __init__(self, P_x: CartesianPartition, dim: int | None = None) -> None:
        super().__init__(P_x, dim)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(x, self.dim)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        shifted, _, sums = self._shifted(x)
        return shifted - sums.log()
