"""Convolutions split over batch and features, with DistDL's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist import nn
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition
from gpudist.compat.distdl.nn.conv_parameters import ConvParameters


class _FeatureConv(ConvParameters):
    """Convolution whose input and output are split over ``P_x``, of shape ``[batch, 1, *spatial]``.

    Rank 0 of ``P_x`` owns weight and bias. The input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        in_channels ... bias: see torch's layer; sizes are global.
        buffer_manager: ignored.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        in_channels: int = 1,
        out_channels: int = 1,
        kernel_size: int | Sequence[int] = 1,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        padding_mode: str = "zeros",
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__(
            P_x.partition, in_channels, out_channels, kernel_size, stride, padding, dilation,
            groups, bias, padding_mode, shape="dynamic",
        )  # fmt: skip

    @property
    def P_wb_cart(self) -> MPICartesianPartition:
        """Partition of the worker that owns weight and bias."""
        root = self.P_x.create_partition_inclusive([0])
        return MPICartesianPartition(root.create_cartesian_topology_partition([1]))


class DistributedFeatureConv1d(_FeatureConv, nn.DistributedConv1d):
    __doc__ = _FeatureConv.__doc__


class DistributedFeatureConv2d(_FeatureConv, nn.DistributedConv2d):
    __doc__ = _FeatureConv.__doc__


class DistributedFeatureConv3d(_FeatureConv, nn.DistributedConv3d):
    __doc__ = _FeatureConv.__doc__
