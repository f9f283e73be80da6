"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.invariant import invariant_copy, invariant_sum
from gpudist.nn.linear import DistributedLinear
from gpudist.nn.loss import DistributedCrossEntropyLoss, DistributedL1Loss, DistributedMSELoss
from gpudist.nn.pixel_shuffle import (
    DistributedChannelShuffle,
    DistributedPixelShuffle,
    DistributedPixelUnshuffle,
)
from gpudist.nn.pool import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from gpudist.nn.upsample import (
    DistributedUpsample,
    DistributedUpsamplingBilinear2d,
    DistributedUpsamplingNearest2d,
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
    "DistributedChannelShuffle",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedCrossEntropyLoss",
    "DistributedL1Loss",
    "DistributedLinear",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedPixelShuffle",
    "DistributedPixelUnshuffle",
    "DistributedUpsample",
    "DistributedUpsamplingBilinear2d",
    "DistributedUpsamplingNearest2d",
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
