"""Distributed power-average pooling over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf, prod

import torch
import torch.nn.functional as F

from gpudist.geometry.windows import Read
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.pool.sliding import PoolBlock, SlidingPool
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
        nested: bool | None = False,
    ) -> None:
        super().__init__(
            P_x, kernel_size, stride, 0, 1, ceil_mode, takes_maximum=isinf(norm_type),
            global_shape=global_shape, shape=shape, nested=nested,
        )  # fmt: skip
        self.norm_type, self.stride = norm_type, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Powers are moved, so that no copy of the cells beside them is kept for backward.
        return self._root(super().forward(self._power(x))) if self.P_x.active else x.clone()

    def bind_block(self, reads: Sequence[Read], shape: Sequence[int]) -> BlockOperation:
        pool = super().bind_block(reads, shape)
        return lambda x: self._root(pool(self._power(x)))

    def pool(self, x: torch.Tensor, block: PoolBlock) -> torch.Tensor:
        return self.maxima(x, block)[0] if self._takes_maximum else self.means(x, block)

    def _power(self, x: torch.Tensor) -> torch.Tensor:
        return self._sign * x.abs() if self._takes_maximum else x.pow(self.norm_type)

    def _root(self, y: torch.Tensor) -> torch.Tensor:
        if self._takes_maximum:
            return self._sign * y
        # The same steps as in torch, which avoid an infinite gradient if all cells are 0.
        sums = torch.sign(y) * torch.relu(torch.abs(y)) * prod(self._kernel)
        return sums.pow(1.0 / self.norm_type)

    @property
    def _sign(self) -> int:
        return 1 if self.norm_type > 0 else -1


@layer(F.lp_pool1d, Sample((2, 4, 9), "positive"), norm_type=2, kernel_size=2)
class DistributedLPPool1d(_DistributedLPPool):
    _dims = 1


@layer(F.lp_pool2d, Sample((2, 4, 9, 8), "positive"), norm_type=2, kernel_size=2)
class DistributedLPPool2d(_DistributedLPPool):
    _dims = 2


@layer(F.lp_pool3d, Sample((2, 4, 5, 6, 3), "positive"), norm_type=2, kernel_size=2)
class DistributedLPPool3d(_DistributedLPPool):
    _dims = 3
