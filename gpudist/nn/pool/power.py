"""Distributed power-average pooling over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf, prod

import torch
import torch.nn.functional as F

from gpudist.geometry.windows import Read
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.pool.sliding import SlidingPool
from gpudist.nn.windowed.region_layer import BlockOperation
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedLPPool(SlidingPool):
    """Norm of sliding windows of a tensor ``[B, C, *spatial]`` partitioned by ``P_x``.

    Any dims may be split, and output blocks are balanced.

    Args:
        P_x: partition of the input and the output.
        norm_type: exponent ``p`` of ``(sum x^p)^(1/p)``; infinity gives the largest magnitude.
        kernel_size, stride, ceil_mode: as in the torch layer; the stride defaults to the kernel
            size.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        overlap: whether to pool the local block in place and its boundary separately, under the
            same conditions as the convolution.
        nested: exchange ghosts dim by dim instead of with all neighbours at once; ``None``: see
            :func:`~gpudist.halo_exchange`.

    Cost:
        The same as an average pool.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments; at the first call,
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
        nested: bool | None = False,
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
        return _WindowNorm(pool, self.norm_type, prod(self._kernel))


# Compared by identity: torch 2.11's Dynamo hashes an instance before its fields are set.
@dataclass(frozen=True, eq=False)
class _WindowNorm:
    """Norm of windows with a given number of cells.

    Attributes:
        pool: pool that computes the mean of a window, or its maximum for an infinite norm.
    """

    pool: BlockOperation
    norm_type: float
    cells: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if isinf(self.norm_type):
            sign = 1 if self.norm_type > 0 else -1
            return sign * self.pool(sign * x.abs())
        means = self.pool(x.pow(self.norm_type))
        # The same steps as in torch, which avoid an infinite gradient if all cells are 0.
        sums = torch.sign(means) * torch.relu(torch.abs(means)) * self.cells
        return sums.pow(1.0 / self.norm_type)


@layer(F.lp_pool1d, Sample((2, 4, 9), "positive"), norm_type=2, kernel_size=2)
class DistributedLPPool1d(_DistributedLPPool):
    _dims = 1


@layer(F.lp_pool2d, Sample((2, 4, 9, 8), "positive"), norm_type=2, kernel_size=2)
class DistributedLPPool2d(_DistributedLPPool):
    _dims = 2


@layer(F.lp_pool3d, Sample((2, 4, 5, 6, 3), "positive"), norm_type=2, kernel_size=2)
class DistributedLPPool3d(_DistributedLPPool):
    _dims = 3
