"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.invariant import invariant_copy, invariant_sum
from gpudist.nn.linear import DistributedLinear
from gpudist.nn.loss import DistributedCrossEntropyLoss, DistributedL1Loss, DistributedMSELoss
from gpudist.nn.pool import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from gpudist.nn.pool_adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from gpudist.nn.pool_power import DistributedLPPool1d, DistributedLPPool2d, DistributedLPPool3d
from gpudist.ops import (
    AllGather,
    AllSumReduce,
    Broadcast,
    Gather,
    HaloExchange,
    Repartition,
    Scatter,
    SendRecv,
    SumReduce,
    SumScatter,
)

__all__ = [
    "AllGather",
    "AllSumReduce",
    "Broadcast",
    "DistributedAdaptiveAvgPool1d",
    "DistributedAdaptiveAvgPool2d",
    "DistributedAdaptiveAvgPool3d",
    "DistributedAdaptiveMaxPool1d",
    "DistributedAdaptiveMaxPool2d",
    "DistributedAdaptiveMaxPool3d",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedCrossEntropyLoss",
    "DistributedL1Loss",
    "DistributedLPPool1d",
    "DistributedLPPool2d",
    "DistributedLPPool3d",
    "DistributedLinear",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "Gather",
    "HaloExchange",
    "Repartition",
    "Scatter",
    "SendRecv",
    "SumReduce",
    "SumScatter",
    "invariant_copy",
    "invariant_sum",
]
