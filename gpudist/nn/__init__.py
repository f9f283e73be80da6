"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn import utils
from gpudist.nn.affine.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.affine.conv_causal import DistributedCausalConv1d
from gpudist.nn.affine.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from gpudist.nn.affine.embedding import DistributedEmbedding
from gpudist.nn.affine.linear import DistributedLinear
from gpudist.nn.attention.all_to_all import AllToAllAttention, all_to_all_attention
from gpudist.nn.attention.multihead import DistributedMultiheadAttention
from gpudist.nn.attention.ring import RingAttention, ring_attention
from gpudist.nn.loss.binary import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHingeEmbeddingLoss,
    DistributedSoftMarginLoss,
)
from gpudist.nn.loss.classes import DistributedCrossEntropyLoss, DistributedNLLLoss
from gpudist.nn.loss.elements import (
    DistributedHuberLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedSmoothL1Loss,
)
from gpudist.nn.loss.embedding import DistributedCosineEmbeddingLoss
from gpudist.nn.loss.likelihood import (
    DistributedGaussianNLLLoss,
    DistributedKLDivLoss,
    DistributedPoissonNLLLoss,
)
from gpudist.nn.norm.batch import (
    DistributedBatchNorm,
    DistributedBatchNorm1d,
    DistributedBatchNorm2d,
    DistributedBatchNorm3d,
)
from gpudist.nn.norm.group import DistributedGroupNorm
from gpudist.nn.norm.instance import (
    DistributedInstanceNorm1d,
    DistributedInstanceNorm2d,
    DistributedInstanceNorm3d,
)
from gpudist.nn.norm.layer import DistributedLayerNorm, DistributedRMSNorm
from gpudist.nn.norm.softmax import (
    DistributedLogSoftmax,
    DistributedSoftmax,
    DistributedSoftmax2d,
    DistributedSoftmin,
)
from gpudist.nn.parameters.movements import fuse_parameter_movements
from gpudist.nn.pool.adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from gpudist.nn.pool.max_avg import (
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedAvgPool3d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedMaxPool3d,
)
from gpudist.nn.pool.power import DistributedLPPool1d, DistributedLPPool2d, DistributedLPPool3d
from gpudist.nn.random.dropout import (
    DistributedAlphaDropout,
    DistributedDropout,
    DistributedDropout1d,
    DistributedDropout2d,
    DistributedDropout3d,
    DistributedFeatureAlphaDropout,
)
from gpudist.nn.tensor_parallel.attention import ParallelAttention
from gpudist.nn.tensor_parallel.embedding import VocabParallelEmbedding
from gpudist.nn.tensor_parallel.invariant import invariant_copy, invariant_sum
from gpudist.nn.tensor_parallel.invariant_blocks import (
    invariant_gather,
    invariant_scatter,
    invariant_share,
)
from gpudist.nn.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from gpudist.nn.tensor_parallel.loss import VocabParallelCrossEntropyLoss
from gpudist.nn.tensor_parallel.qkv import ParallelQKV
from gpudist.nn.tensor_parallel.region import sequence_lengths
from gpudist.nn.windowed.halo_region import HaloRegion
from gpudist.nn.windowed.pad import (
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
from gpudist.nn.windowed.pixel_shuffle import (
    DistributedChannelShuffle,
    DistributedPixelShuffle,
    DistributedPixelUnshuffle,
)
from gpudist.nn.windowed.upsample import (
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
    "AllToAllAttention",
    "Broadcast",
    "ColumnParallelLinear",
    "DistributedAdaptiveAvgPool1d",
    "DistributedAdaptiveAvgPool2d",
    "DistributedAdaptiveAvgPool3d",
    "DistributedAdaptiveMaxPool1d",
    "DistributedAdaptiveMaxPool2d",
    "DistributedAdaptiveMaxPool3d",
    "DistributedAlphaDropout",
    "DistributedAvgPool1d",
    "DistributedAvgPool2d",
    "DistributedAvgPool3d",
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedBatchNorm",
    "DistributedBatchNorm1d",
    "DistributedBatchNorm2d",
    "DistributedBatchNorm3d",
    "DistributedCausalConv1d",
    "DistributedChannelShuffle",
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
    "DistributedCosineEmbeddingLoss",
    "DistributedCrossEntropyLoss",
    "DistributedDropout",
    "DistributedDropout1d",
    "DistributedDropout2d",
    "DistributedDropout3d",
    "DistributedEmbedding",
    "DistributedFeatureAlphaDropout",
    "DistributedGaussianNLLLoss",
    "DistributedGroupNorm",
    "DistributedHingeEmbeddingLoss",
    "DistributedHuberLoss",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLPPool1d",
    "DistributedLPPool2d",
    "DistributedLPPool3d",
    "DistributedLayerNorm",
    "DistributedLinear",
    "DistributedLogSoftmax",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedMultiheadAttention",
    "DistributedNLLLoss",
    "DistributedPixelShuffle",
    "DistributedPixelUnshuffle",
    "DistributedPoissonNLLLoss",
    "DistributedRMSNorm",
    "DistributedReflectionPad1d",
    "DistributedReflectionPad2d",
    "DistributedReflectionPad3d",
    "DistributedReplicationPad1d",
    "DistributedReplicationPad2d",
    "DistributedReplicationPad3d",
    "DistributedSmoothL1Loss",
    "DistributedSoftMarginLoss",
    "DistributedSoftmax",
    "DistributedSoftmax2d",
    "DistributedSoftmin",
    "DistributedUpsample",
    "DistributedUpsamplingBilinear2d",
    "DistributedUpsamplingNearest2d",
    "DistributedZeroPad1d",
    "DistributedZeroPad2d",
    "DistributedZeroPad3d",
    "Gather",
    "HaloExchange",
    "HaloRegion",
    "ParallelAttention",
    "ParallelQKV",
    "Repartition",
    "RingAttention",
    "RowParallelLinear",
    "Scatter",
    "SendRecv",
    "SumReduce",
    "SumScatter",
    "VocabParallelCrossEntropyLoss",
    "VocabParallelEmbedding",
    "all_to_all_attention",
    "fuse_parameter_movements",
    "invariant_copy",
    "invariant_gather",
    "invariant_scatter",
    "invariant_share",
    "invariant_sum",
    "ring_attention",
    "sequence_lengths",
    "utils",
]


def __dir__() -> list[str]:
    return __all__
