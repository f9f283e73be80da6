"""Distributed power-average pooling over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf, prod

import torch

from gpudist.geometry.composed import Read
from gpudist.nn.pool.sliding import SlidingPool
from gpudist.nn.windowed.region_layer import BlockOperation
from gpudist.ops.agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedLPPool(SlidingPool):
    """Norm of sliding windows of a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims.

    Output blocks are balanced.

    Args:
        P_x: owns the input and the output.
        norm_type: ``p`` of ``(sum x^p)^(1/p)``; infinite for the largest magnitude.
        kernel_size, stride, ceil_mode: as torch's layer; the stride is the kernel size unless
            given.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        overlap: pool the own block in place and its boundary apart, where that is possible and
            pays, by the rule of the convolution; ``False`` refuses.
        nested: exchange ghosts dim after dim instead of with all neighbours at once.

    Cost:
        That of an average pool.

    Raises:
        PartitionError, ShapeError: at construction, for what is not supported; at the first call,
            for a kernel that does not fit the global extent.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        norm_type: float,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        ceil_mode: bool = False,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        overlap: bool = True,
        nested: bool = False,
    ) -> None:
        super().__init__(
            P_x, kernel_size, stride, 0, 1, ceil_mode, takes_maximum=isinf(norm_type),
            global_shape=global_shape, shape=shape, overlap=overlap, nested=nested,
        )  # fmt: skip
        self.norm_type, self.stride = norm_type, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.P_x.active:
            return x.clone()
        return self._norm(super().forward)(x)

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        return self._norm(super().bind_block(reads, shape))

    def _norm(self, pool: BlockOperation) -> BlockOperation:
        return _Norm(pool, self.norm_type, prod(self._kernel))


# By identity, since torch 2.11's Dynamo asks for the hash of one that has no fields yet.
@dataclass(frozen=True, eq=False)
class _Norm:
    """The norm of windows of so many cells.

    Attributes:
        pool: gives the windows' means, or their maxima for an infinite norm.
    """

    pool: BlockOperation
    norm_type: float
    cells: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinf(self.norm_type):
            sign = 1 if self.norm_type > 0 else -1
            return sign * self.pool(sign * x.abs())
        means = self.pool(x.pow(self.norm_type))
        # In torch's steps, which have no infinite gradient where all cells are 0.
        sums = torch.sign(means) * torch.relu(torch.abs(means)) * self.cells
        return sums.pow(1.0 / self.norm_type)


class DistributedLPPool1d(_DistributedLPPool):
    __doc__ = _DistributedLPPool.__doc__
    _dims = 1


class DistributedLPPool2d(_DistributedLPPool):
    __doc__ = _DistributedLPPool.__doc__
    _dims = 2


class DistributedLPPool3d(_DistributedLPPool):
    __doc__ = _DistributedLPPool.__doc__
    _dims = 3
