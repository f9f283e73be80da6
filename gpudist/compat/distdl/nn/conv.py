"""Convolutions that select their class by the partitions they are given."""

from __future__ import annotations

from typing import Any

import torch

from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition
from gpudist.compat.distdl.nn.conv_channel import (
    DistributedChannelConv1d,
    DistributedChannelConv2d,
    DistributedChannelConv3d,
)
from gpudist.compat.distdl.nn.conv_feature import (
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedFeatureConv3d,
)
from gpudist.compat.distdl.nn.conv_general import (
    DistributedGeneralConv1d,
    DistributedGeneralConv2d,
    DistributedGeneralConv3d,
)
from gpudist.errors import PartitionError

Kind = type[torch.nn.Module]


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

    _feature: Kind
    _channel: Kind
    _general: Kind

    def __new__(
        cls,
        P_x: MPICartesianPartition,
        P_y: MPICartesianPartition | None = None,
        P_w: MPICartesianPartition | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if P_y is None and P_w is None:
            return cls._feature(P_x, *args, **kwargs)
        if P_y is None or P_w is None:
            raise PartitionError(
                f"{cls.__name__}: P_y and P_w belong together; give both or neither, and "
                "in_channels by name"
            )
        split = {*P_x.shape[2:].tolist(), *P_y.shape[2:].tolist()} - {1}
        return (cls._general if split else cls._channel)(P_x, P_y, P_w, *args, **kwargs)


class DistributedConv1d(_Selector):
    __doc__ = _Selector.__doc__
    _feature = DistributedFeatureConv1d
    _channel = DistributedChannelConv1d
    _general = DistributedGeneralConv1d


class DistributedConv2d(_Selector):
    __doc__ = _Selector.__doc__
    _feature = DistributedFeatureConv2d
    _channel = DistributedChannelConv2d
    _general = DistributedGeneralConv2d


class DistributedConv3d(_Selector):
    __doc__ = _Selector.__doc__
    _feature = DistributedFeatureConv3d
    _channel = DistributedChannelConv3d
    _general = DistributedGeneralConv3d
