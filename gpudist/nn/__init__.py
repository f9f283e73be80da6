"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn import utils
from gpudist.nn.attention import DistributedMultiheadAttention
from gpudist.nn.attention_all_to_all import AllToAllAttention, all_to_all_attention
from gpudist.nn.attention_ring import RingAttention, ring_attention
from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.conv_causal import DistributedCausalConv1d
from gpudist.nn.conv_transpose import (
    DistributedConvTranspose1d,
    DistributedConvTranspose2d,
    DistributedConvTranspose3d,
)
from gpudist.nn.dropout import (
    DistributedAlphaDropout,
    DistributedDropout,
    DistributedDropout1d,
    DistributedDropout2d,
    DistributedDropout3d,
    DistributedFeatureAlphaDropout,
)
from gpudist.nn.embedding import DistributedEmbedding
from gpudist.nn.halo_region import HaloRegion
from gpudist.nn.invariant import invariant_copy, invariant_sum
from gpudist.nn.invariant_blocks import invariant_gather, invariant_scatter, invariant_share
from gpudist.nn.linear import DistributedLinear
from gpudist.nn.loss_binary import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHingeEmbeddingLoss,
    DistributedSoftMarginLoss,
)
from gpudist.nn.loss_classes import DistributedCrossEntropyLoss, DistributedNLLLoss
from gpudist.nn.loss_elements import (
    DistributedHuberLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedSmoothL1Loss,
)
from gpudist.nn.loss_embedding import DistributedCosineEmbeddingLoss
from gpudist.nn.loss_likelihood import (
    DistributedGaussianNLLLoss,
    DistributedKLDivLoss,
    DistributedPoissonNLLLoss,
)
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
from gpudist.nn.parallel_attention import ParallelAttention
from gpudist.nn.parallel_embedding import VocabParallelEmbedding
from gpudist.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from gpudist.nn.parallel_loss import VocabParallelCrossEntropyLoss
from gpudist.nn.parallel_qkv import ParallelQKV
from gpudist.nn.parameter_movements import fuse_parameter_movements
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
from gpudist.nn.pool_adaptive import (
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d,
)
from gpudist.nn.pool_power import DistributedLPPool1d, DistributedLPPool2d, DistributedLPPool3d
from gpudist.nn.softmax import (
    DistributedLogSoftmax,
    DistributedSoftmax,
    DistributedSoftmax2d,
    DistributedSoftmin,
)
from gpudist.nn.tensor_region import sequence_lengths
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
