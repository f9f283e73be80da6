"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.invariant import invariant_copy, invariant_sum
from gpudist.nn.linear import DistributedLinear
from gpudist.nn.loss import DistributedCrossEntropyLoss, DistributedL1Loss, DistributedMSELoss
from gpudist.nn.norm_batch import (
    DistributedBatchNorm,
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedBatchNorm3d,
)
from gpudist.nn.norm_group import DistributedGroupNorm
from gpudist.nn.norm_instance import (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)
from gpudist.nn.norm_layer import DistributedLayerNorm, DistributedRMSNorm
from gpudist.nn.pool import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
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
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedBatchNorm",
    "DistributedBatchNorm1d",
    "DistributedBatchNorm2d",
    "DistributedBatchNorm3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedCrossEntropyLoss",
    "DistributedGroupNorm",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
    "DistributedL1Loss",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedRMSNorm",
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
