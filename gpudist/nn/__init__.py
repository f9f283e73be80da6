"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.conv_causal import DistributedCausalConv1d
from gpudist.nn.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from gpudist.nn.halo_region import HaloRegion
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
from gpudist.nn.pad import (
    DistributedCircularPad1d,
    DistributedCircularPad2d,
    DistributedCircularPad3d,
    DistributedConstantPad1d,
    DistributedConstantPad2d,
    DistributedConstantPad3d,
    DistributedReflectionPad1d,
    DistributedReflectionPad2d,
    DistributedReflectionPad3d,
    DistributedReplicationPad1d,
    DistributedReplicationPad2d,
    DistributedReplicationPad3d,
    DistributedZeroPad1d,
    DistributedZeroPad2d,
    DistributedZeroPad3d,
)
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
    "DistributedBatchNorm",
    "DistributedBatchNorm1d",
    "DistributedBatchNorm2d",
    "DistributedBatchNorm3d",
    "DistributedCausalConv1d",
    "DistributedCircularPad1d",
    "DistributedCircularPad2d",
    "DistributedCircularPad3d",
    "DistributedConstantPad1d",
    "DistributedConstantPad2d",
    "DistributedConstantPad3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedConvTranspose1d",
    "DistributedConvTranspose2d",
    "DistributedConvTranspose3d",
    "DistributedCrossEntropyLoss",
    "DistributedGroupNorm",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
    "DistributedL1Loss",
    "DistributedLPPool1d",
    "DistributedLPPool2d",
    "DistributedLPPool3d",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedRMSNorm",
    "DistributedReflectionPad1d",
    "DistributedReflectionPad2d",
    "DistributedReflectionPad3d",
    "DistributedReplicationPad1d",
    "DistributedReplicationPad2d",
    "DistributedReplicationPad3d",
    "DistributedZeroPad1d",
    "DistributedZeroPad2d",
    "DistributedZeroPad3d",
    "Gather",
    "HaloExchange",
    "HaloRegion",
    "Repartition",
    "Scatter",
    "SendRecv",
    "SumReduce",
    "SumScatter",
    "invariant_copy",
    "invariant_sum",
]
