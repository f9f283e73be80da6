"""Pools with DistDL's arguments; the default stride is 1."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist import nn
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition
from gpudist.compat.distdl.nn.adapter import Adapter


class _AvgPool(Adapter):
    """Average pool of a tensor split over ``P_x``; the input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        kernel_size, padding: see torch's layer.
        stride: cells between two outputs; unlike torch's layer, 1 by default.
        buffer_manager: ignored.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__(P_x.partition, kernel_size, stride, padding, shape="dynamic")


class _MaxPool(Adapter):
    """Maximum pool of a tensor split over ``P_x``; the input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        kernel_size, padding, dilation: see torch's layer.
        stride: cells between two outputs; unlike torch's layer, 1 by default.
        buffer_manager: ignored.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__(P_x.partition, kernel_size, stride, padding, dilation, shape="dynamic")


class DistributedAvgPool1d(_AvgPool, nn.DistributedAvgPool1d):
    __doc__ = _AvgPool.__doc__


class DistributedAvgPool2d(_AvgPool, nn.DistributedAvgPool2d):
    __doc__ = _AvgPool.__doc__


class DistributedAvgPool3d(_AvgPool, nn.DistributedAvgPool3d):
    __doc__ = _AvgPool.__doc__


class DistributedMaxPool1d(_MaxPool, nn.DistributedMaxPool1d):
    __doc__ = _MaxPool.__doc__


class DistributedMaxPool2d(_MaxPool, nn.DistributedMaxPool2d):
    __doc__ = _MaxPool.__doc__


class DistributedMaxPool3d(_MaxPool, nn.DistributedMaxPool3d):
    __doc__ = _MaxPool.__doc__
