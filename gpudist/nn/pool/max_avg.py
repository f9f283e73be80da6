"""Distributed max and average pooling over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from gpudist.errors import ShapeError
from gpudist.nn.layer_table import Sample, layer
from gpudist.nn.pool.sliding import PoolBlock, SlidingPool
from gpudist.ops.operator import placeholder_shape
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedMaxPool(SlidingPool):
    """Maximum over sliding windows of a tensor ``[B, C, *spatial]`` partitioned by ``P_x``.

    Any dims may be split, and output blocks are balanced. Ties and NaN are resolved in favour of
    the same cell as in the torch layer, for values and gradients. A window with only ``-inf`` never
    passes its gradient to padding.

    Args:
        P_x: partition of the input and the output.
        kernel_size, stride, padding, dilation, ceil_mode: as in the torch layer; the stride
            defaults to the kernel size.
        return_indices: return ``(output, indices)``, with flat indices in the spatial dims of the
            global tensor, independent of the partition.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        nested: exchange ghosts dim by dim instead of with all neighbours at once; ``None``: see
            :func:`~gpudist.halo_exchange`.

    Cost:
        One halo exchange, which copies the block; no message and no copy if no window crosses
        blocks. Backward moves the same bytes. A window is gathered on the worker that owns its
        output, so prefer an adaptive pool to windows much larger than blocks.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments; at the first call,
            for a kernel that does not fit the global extent, or a window that holds padding only.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        nested: bool | None = False,
    ) -> None:
        super().__init__(
            P_x, kernel_size, stride, padding, dilation, ceil_mode, takes_maximum=True,
            global_shape=global_shape, shape=shape, nested=nested,
        )  # fmt: skip
        self.return_indices = return_indices

    def forward(self, x: torch.Tensor) -> Any:
        return self.with_indices(x) if self.return_indices else super().forward(x)

    def with_indices(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maxima, and their flat indices in the spatial dims of the global tensor."""
        if not self.P_x.active:
            return x.clone(), x.new_empty(placeholder_shape(x), dtype=torch.int64)
        cells, block = self.gather(x)
        if 0 in block.shape:
            return self.pool_block(cells, block), x.new_empty(block.shape, dtype=torch.int64)
        y, places = self.maxima(cells, block)
        return y, block.global_places(places, cells.shape[2:])

    def pool(self, x: torch.Tensor, block: PoolBlock) -> torch.Tensor:
        return self.maxima(x, block)[0]

    def require_region(self) -> None:
        if self.return_indices:
            raise ShapeError(
                f"{self._name}: return_indices is not supported in a HaloRegion, which has one "
                "output; omit it"
            )


class _DistributedAvgPool(SlidingPool):
    """Mean over sliding windows of a tensor ``[B, C, *spatial]`` partitioned by ``P_x``.

    Any dims may be split, and output blocks are balanced.

    Args:
        P_x: partition of the input and the output.
        kernel_size, stride, padding, ceil_mode: as in the torch layer; the stride defaults to the
            kernel size.
        count_include_pad: whether padding counts in the mean. Cells beyond the padding, which
            windows read with ``ceil_mode``, never count.
        divisor_override: divisor of the sums instead of the number of cells.
        global_shape: global shape of a balanced input; saves the agreement on its blocks.
        shape: ``"dynamic"`` makes the ranks agree on the input's blocks at every call.
        nested: exchange ghosts dim by dim instead of with all neighbours at once; ``None``: see
            :func:`~gpudist.halo_exchange`.

    Cost:
        One halo exchange, which copies the block; no message and no copy if no window crosses
        blocks. Backward moves the same bytes. A window is gathered on the worker that owns its
        output, so prefer an adaptive pool to windows much larger than blocks.

    Raises:
        PartitionError, ShapeError: at construction, for unsupported arguments; at the first call,
            for a kernel that does not fit the global extent.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
        nested: bool | None = False,
    ) -> None:
        if divisor_override is not None and divisor_override <= 0:
            raise ShapeError(
                f"{type(self).__name__}: divisor_override is {divisor_override} but must be "
                "positive"
            )
        super().__init__(
            P_x, kernel_size, stride, padding, 1, ceil_mode, takes_maximum=False,
            global_shape=global_shape, shape=shape, nested=nested,
        )  # fmt: skip
        self.count_include_pad, self.divisor_override = count_include_pad, divisor_override
        if self._dims == 1:  # torch's layer stores these as tuples.
            self.kernel_size, self.stride, self.padding = (
                self._kernel,
                self._strides,
                self._paddings,
            )

    def pool(self, x: torch.Tensor, block: PoolBlock) -> torch.Tensor:
        if self.divisor_override is None:
            return self.means(x, block, self.count_include_pad)
        return self.full_means(x, block) * (prod(self._kernel) / self.divisor_override)


@layer(F.max_pool1d, Sample((2, 4, 9)), kernel_size=3, stride=2, padding=1)
class DistributedMaxPool1d(_DistributedMaxPool):
    _dims = 1


@layer(F.max_pool2d, Sample((2, 4, 9, 8)), kernel_size=3, stride=2, padding=1)
class DistributedMaxPool2d(_DistributedMaxPool):
    _dims = 2


@layer(F.max_pool3d, Sample((2, 4, 5, 6, 3)), kernel_size=3, stride=2, padding=1)
class DistributedMaxPool3d(_DistributedMaxPool):
    _dims = 3


@layer(F.avg_pool1d, Sample((2, 4, 9)), kernel_size=3, stride=2, padding=1)
class DistributedAvgPool1d(_DistributedAvgPool):
    _dims = 1


@layer(F.avg_pool2d, Sample((2, 4, 9, 8)), kernel_size=3, stride=2, padding=1)
class DistributedAvgPool2d(_DistributedAvgPool):
    _dims = 2


@layer(F.avg_pool3d, Sample((2, 4, 5, 6, 3)), kernel_size=3, stride=2, padding=1)
class DistributedAvgPool3d(_DistributedAvgPool):
    _dims = 3
