"""Convolutions with DistDL's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gpudist import nn
from gpudist.compat.distdl.adapter import MPIBufferManager, adapt, make
from gpudist.compat.distdl.partition import MPICartesianPartition
from gpudist.errors import PartitionError


def feature_convolution(
    self: Any,
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
    """Convolution whose input and output are split over ``P_x``, of shape ``[batch, 1, *spatial]``.

    Rank 0 of ``P_x`` owns weight and bias. The input's blocks may change at every call.

    Args:
        P_x: partition of input and output.
        in_channels ... bias: see torch's layer; sizes are global.
        buffer_manager: ignored.
    """


def general_convolution(
    self: Any,
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
    """Convolution whose channels are split too.

    The workers of ``P_w`` at spatial index 0 own the blocks of the weight, and those also at input
    channel index 0 own the blocks of the bias. The input's blocks may change at every call.

    Args:
        P_x, P_y, P_w: partitions of input, output and weight, of shapes ``[1, ci, *spatial]``,
            ``[1, co, *spatial]`` and ``[co, ci, *spatial]``.
        in_channels ... bias: see torch's layer; sizes are global.
        buffer_manager: ignored.
    """


class _Parameters:
    """Properties of a convolution, in DistDL's names."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    P_x: Any

    @property
    def conv_layer(self) -> Any:
        """This layer: DistDL keeps ``weight`` and ``bias`` in a layer within."""
        return self

    @property
    def stores_weight(self) -> bool:
        """Whether this worker owns a block of the weight."""
        return self.weight.numel() > 0

    @property
    def stores_bias(self) -> bool:
        """Whether this worker owns a block of the bias."""
        return self.bias is not None and self.bias.numel() > 0


class _OwnedByOne(_Parameters):
    @property
    def P_wb_cart(self) -> MPICartesianPartition:
        """Partition of the worker that owns weight and bias."""
        root = self.P_x.create_partition_inclusive([0])
        return MPICartesianPartition(root.create_cartesian_topology_partition([1]))


class _Selector:
    """Convolution whose class is selected by its partitions.

    ``P_x`` alone gives a feature convolution. With ``P_y`` and ``P_w``, a channel convolution if
    only channels are split, otherwise a general one.

    Args:
        P_x, P_y, P_w: partitions of input, output and weight.
        args, kwargs: further arguments of the selected class.

    Raises:
        PartitionError: one of ``P_y`` and ``P_w`` is given without the other.
    """

    def __new__(
        cls,
        P_x: MPICartesianPartition,
        P_y: MPICartesianPartition | None = None,
        P_w: MPICartesianPartition | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        family = "Distributed{}" + cls.__name__.removeprefix("Distributed")
        if P_y is None and P_w is None:
            return CONVOLUTIONS[family.format("Feature")](P_x, *args, **kwargs)
        if P_y is None or P_w is None:
            raise PartitionError(
                f"{cls.__name__}: P_y and P_w belong together; give both or neither, and "
                "in_channels by name"
            )
        split = {*P_x.shape[2:].tolist(), *P_y.shape[2:].tolist()} - {1}
        name = family.format("General" if split else "Channel")
        return CONVOLUTIONS[name](P_x, P_y, P_w, *args, **kwargs)


_LAYERS = {
    "Conv1d": nn.DistributedConv1d,
    "Conv2d": nn.DistributedConv2d,
    "Conv3d": nn.DistributedConv3d,
}
_FAMILIES = {
    "Feature": (feature_convolution, _OwnedByOne),
    "Channel": (general_convolution, _Parameters),
    "General": (general_convolution, _Parameters),
}
CONVOLUTIONS: dict[str, Any] = {
    f"Distributed{kind}": make(f"Distributed{kind}", _Selector) for kind in _LAYERS
} | {
    f"Distributed{family}{kind}": adapt(f"Distributed{family}{kind}", arguments, properties, layer)
    for family, (arguments, properties) in _FAMILIES.items()
    for kind, layer in _LAYERS.items()
}
"""Classes by DistDL's names."""
