"""Distributed max and average pooling over any partition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist.errors import ShapeError
from gpudist.nn.pool.sliding import SlidingPool
from gpudist.ops.agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


class _DistributedMaxPool(SlidingPool):
    """Maximum over sliding windows of a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims.

    Output blocks are balanced. Ties and NaN give value and gradient to the same cell as in the
    torch layer; a window that holds ``-inf`` alone gives its gradient to no padding.

    Args:
        P_x: owns the input and the output.
        kernel_size, stride, padding, dilation, ceil_mode: as torch's layer; the stride is the
            kernel size unless given.
        return_indices: return ``(output, indices)``: flat indices in the spatial dims of the global
            tensor, which no blocks are known by. The block is then never pooled in place.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        overlap: pool the own block in place and its boundary apart, where that is possible and
            pays, by the rule of the convolution; ``False`` refuses.
        nested: exchange ghosts dim after dim instead of with all neighbours at once.

    Cost:
        One halo exchange, which copies the block unless it is pooled in place; neither where no
        window crosses blocks. Backward moves the same bytes. A window is gathered on the worker
        with its output: prefer an adaptive pool to windows much larger than blocks.

    Raises:
        PartitionError, ShapeError: at construction, for what is not supported; at the first call,
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
        overlap: bool = True,
        nested: bool = False,
    ) -> None:
        super().__init__(
            P_x, kernel_size, stride, padding, dilation, ceil_mode, takes_maximum=True,
            global_shape=global_shape, shape=shape, overlap=overlap and not return_indices,
            nested=nested,
        )  # fmt: skip
        self.return_indices = return_indices

    def forward(self, x: torch.Tensor) -> Any:
        return self.with_indices(x) if self.return_indices else super().forward(x)

    def require_region(self) -> None:
        if self.return_indices:
            raise ShapeError(
                f"{self._name}: return_indices is not supported in a region, which has one output"
            )


class _DistributedAvgPool(SlidingPool):
    """Mean over sliding windows of a tensor ``[B, C, *spatial]`` cut over ``P_x`` in any dims.

    Output blocks are balanced.

    Args:
        P_x: owns the input and the output.
        kernel_size, stride, padding, ceil_mode: as torch's layer; the stride is the kernel size
            unless given.
        count_include_pad: whether padding counts in the mean. What a window of ``ceil_mode`` reads
            beyond the padding never counts.
        divisor_override: divide by this instead of the number of cells.
        global_shape: of the input, if it is balanced, to save agreeing on its blocks.
        shape: ``"dynamic"`` agrees on the input's blocks at every call.
        overlap: pool the own block in place and its boundary apart, where that is possible and
            pays, by the rule of the convolution; ``False`` refuses.
        nested: exchange ghosts dim after dim instead of with all neighbours at once.

    Cost:
        One halo exchange, which copies the block unless it is pooled in place; neither where no
        window crosses blocks. Backward moves the same bytes. A window is gathered on the worker
        with its output: prefer an adaptive pool to windows much larger than blocks.

    Raises:
        PartitionError, ShapeError: at construction, for what is not supported; at the first call,
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
        overlap: bool = True,
        nested: bool = False,
    ) -> None:
        if divisor_override is not None and divisor_override <= 0:
            raise ShapeError(
                f"{type(self).__name__}: divisor_override is {divisor_override} but must be "
                "positive"
            )
        super().__init__(
            P_x, kernel_size, stride, padding, 1, ceil_mode, takes_maximum=False,
            divisor=divisor_override, count_include_pad=count_include_pad,
            global_shape=global_shape, shape=shape, overlap=overlap, nested=nested,
        )  # fmt: skip
        self.divisor_override = divisor_override


class DistributedMaxPool1d(_DistributedMaxPool):
    __doc__ = _DistributedMaxPool.__doc__
    _dims = 1


class DistributedMaxPool2d(_DistributedMaxPool):
    __doc__ = _DistributedMaxPool.__doc__
    _dims = 2


class DistributedMaxPool3d(_DistributedMaxPool):
    __doc__ = _DistributedMaxPool.__doc__
    _dims = 3


class DistributedAvgPool1d(_DistributedAvgPool):
    __doc__ = _DistributedAvgPool.__doc__
    _dims = 1


class DistributedAvgPool2d(_DistributedAvgPool):
    __doc__ = _DistributedAvgPool.__doc__
    _dims = 2


class DistributedAvgPool3d(_DistributedAvgPool):
    __doc__ = _DistributedAvgPool.__doc__
    _dims = 3
