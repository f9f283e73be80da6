"""DistDL's layers, over those of gpudist: each takes DistDL's arguments and partitions."""

from gpudist.compat.distdl.nn import (
    batchnorm as batchnorm,
    conv_feature as conv_feature,
    linear as linear,
    loss as loss,
    pooling as pooling,
)
from gpudist.compat.distdl.nn.all_sum_reduce import AllSumReduce
from gpudist.compat.distdl.nn.batchnorm import DistributedBatchNorm
from gpudist.compat.distdl.nn.broadcast import Broadcast
from gpudist.compat.distdl.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
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
from gpudist.compat.distdl.nn.halo_exchange import HaloExchange
from gpudist.compat.distdl.nn.interpolate import Interpolate
from gpudist.compat.distdl.nn.linear import DistributedLinear
from gpudist.compat.distdl.nn.loss import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
)
from gpudist.compat.distdl.nn.module import Module
from gpudist.compat.distdl.nn.pooling import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from gpudist.compat.distdl.nn.repartition import Repartition
from gpudist.compat.distdl.nn.sum_reduce import SumReduce
from gpudist.compat.distdl.nn.transpose import DistributedTranspose
from gpudist.compat.distdl.nn.upsampling import DistributedUpsample

__all__ = [
    "AllSumReduce",
    "Broadcast",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm",
    "DistributedChannelConv1d",
    "DistributedChannelConv2d",
    "DistributedChannelConv3d",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedFeatureConv1d",
    "DistributedFeatureConv2d",
    "DistributedFeatureConv3d",
    "DistributedGeneralConv1d",
    "DistributedGeneralConv2d",
    "DistributedGeneralConv3d",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLinear",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedPoissonNLLLoss",
    "DistributedTranspose",
    "DistributedUpsample",
    "HaloExchange",
    "Interpolate",
    "Module",
    "Repartition",
    "SumReduce",
]
