"""Convolutions split over channels and features, with DistDL's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist import nn
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition
from gpudist.compat.distdl.nn.conv_parameters import ConvParameters


class GeneralConv(ConvParameters):
    """Convolution whose channels are split too.

    The workers of ``P_w`` at spatial index 0 own the blocks of the weight, and those also at input
    channel index 0 own the blocks of the bias. The input's blocks may change at every call.

    Args:
        P_x, P_y, P_w: partitions of input, output and weight, of shapes ``[1, ci, *spatial]``,
            ``[1, co, *spatial]`` and ``[co, ci, *spatial]``.
        in_channels ... bias: see torch's layer; sizes are global.
        buffer_manager: ignored.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        P_y: MPICartesianPartition,
        P_w: MPICartesianPartition,
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
            P_x.partition, P_y.partition, P_w.partition, in_channels, out_channels, kernel_size,
            stride, padding, dilation, groups, bias, padding_mode, shape="dynamic",
        )  # fmt: skip


class DistributedGeneralConv1d(GeneralConv, nn.DistributedConv1d):
    __doc__ = GeneralConv.__doc__


class DistributedGeneralConv2d(GeneralConv, nn.DistributedConv2d):
    __doc__ = GeneralConv.__doc__


class DistributedGeneralConv3d(GeneralConv, nn.DistributedConv3d):
    __doc__ = GeneralConv.__doc__
