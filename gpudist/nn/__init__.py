"""Drop-in distributed layers, and the primitives as modules.

An added line ``from ... import Name as Name`` makes a name public.
"""

import types
import typing

from gpudist.checks.hints import MissingName as _MissingName
from gpudist.nn import utils as utils
from gpudist.nn.affine.conv import (
    DistributedConv1d as DistributedConv1d,
    DistributedConv2d as DistributedConv2d,
    DistributedConv3d as DistributedConv3d,
)
from gpudist.nn.affine.conv_causal import DistributedCausalConv1d as DistributedCausalConv1d
from gpudist.nn.affine.conv_transpose import (
    DistributedConvTranspose1d as DistributedConvTranspose1d,
    DistributedConvTranspose2d as DistributedConvTranspose2d,
    DistributedConvTranspose3d as DistributedConvTranspose3d,
)
from gpudist.nn.affine.embedding import DistributedEmbedding as DistributedEmbedding
from gpudist.nn.affine.linear import DistributedLinear as DistributedLinear
from gpudist.nn.affine.prelu import DistributedPReLU as DistributedPReLU
from gpudist.nn.attention.all_to_all import AllToAllAttention as AllToAllAttention
from gpudist.nn.attention.multihead import (
    DistributedMultiheadAttention as DistributedMultiheadAttention,
)
from gpudist.nn.attention.ring import RingAttention as RingAttention
from gpudist.nn.layer_table import LAYERS as LAYERS
from gpudist.nn.loss.binary import (
    DistributedBCELoss as DistributedBCELoss,
    DistributedBCEWithLogitsLoss as DistributedBCEWithLogitsLoss,
    DistributedHingeEmbeddingLoss as DistributedHingeEmbeddingLoss,
    DistributedSoftMarginLoss as DistributedSoftMarginLoss,
)
from gpudist.nn.loss.classes import (
    DistributedCrossEntropyLoss as DistributedCrossEntropyLoss,
    DistributedNLLLoss as DistributedNLLLoss,
)
from gpudist.nn.loss.cosine_embedding import (
    DistributedCosineEmbeddingLoss as DistributedCosineEmbeddingLoss,
)
from gpudist.nn.loss.elements import (
    DistributedHuberLoss as DistributedHuberLoss,
    DistributedL1Loss as DistributedL1Loss,
    DistributedMSELoss as DistributedMSELoss,
    DistributedSmoothL1Loss as DistributedSmoothL1Loss,
)
from gpudist.nn.loss.likelihood import (
    DistributedGaussianNLLLoss as DistributedGaussianNLLLoss,
    DistributedKLDivLoss as DistributedKLDivLoss,
    DistributedPoissonNLLLoss as DistributedPoissonNLLLoss,
)
from gpudist.nn.norm.batch import (
    DistributedBatchNorm as DistributedBatchNorm,
    DistributedBatchNorm1d as DistributedBatchNorm1d,
    DistributedBatchNorm2d as DistributedBatchNorm2d,
    DistributedBatchNorm3d as DistributedBatchNorm3d,
)
from gpudist.nn.norm.group import DistributedGroupNorm as DistributedGroupNorm
from gpudist.nn.norm.instance import (
    DistributedInstanceNorm1d as DistributedInstanceNorm1d,
    DistributedInstanceNorm2d as DistributedInstanceNorm2d,
    DistributedInstanceNorm3d as DistributedInstanceNorm3d,
)
from gpudist.nn.norm.layer_norm import (
    DistributedLayerNorm as DistributedLayerNorm,
    DistributedRMSNorm as DistributedRMSNorm,
)
from gpudist.nn.norm.softmax import (
    DistributedLogSoftmax as DistributedLogSoftmax,
    DistributedSoftmax as DistributedSoftmax,
    DistributedSoftmax2d as DistributedSoftmax2d,
    DistributedSoftmin as DistributedSoftmin,
)
from gpudist.nn.parameters.movements import fuse_parameter_movements as fuse_parameter_movements
from gpudist.nn.pool.adaptive import (
    DistributedAdaptiveAvgPool1d as DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d as DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveAvgPool3d as DistributedAdaptiveAvgPool3d,
    DistributedAdaptiveMaxPool1d as DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d as DistributedAdaptiveMaxPool2d,
    DistributedAdaptiveMaxPool3d as DistributedAdaptiveMaxPool3d,
)
from gpudist.nn.pool.max_avg import (
    DistributedAvgPool1d as DistributedAvgPool1d,
    DistributedAvgPool2d as DistributedAvgPool2d,
    DistributedAvgPool3d as DistributedAvgPool3d,
    DistributedMaxPool1d as DistributedMaxPool1d,
    DistributedMaxPool2d as DistributedMaxPool2d,
    DistributedMaxPool3d as DistributedMaxPool3d,
)
from gpudist.nn.pool.power import (
    DistributedLPPool1d as DistributedLPPool1d,
    DistributedLPPool2d as DistributedLPPool2d,
    DistributedLPPool3d as DistributedLPPool3d,
)
from gpudist.nn.random.dropout import (
    DistributedAlphaDropout as DistributedAlphaDropout,
    DistributedDropout as DistributedDropout,
    DistributedDropout1d as DistributedDropout1d,
    DistributedDropout2d as DistributedDropout2d,
    DistributedDropout3d as DistributedDropout3d,
    DistributedFeatureAlphaDropout as DistributedFeatureAlphaDropout,
)
from gpudist.nn.tensor_parallel.attention import ParallelAttention as ParallelAttention
from gpudist.nn.tensor_parallel.embedding import VocabParallelEmbedding as VocabParallelEmbedding
from gpudist.nn.tensor_parallel.invariant import invariant_copy as invariant_copy
from gpudist.nn.tensor_parallel.invariant_blocks import (
    invariant_gather as invariant_gather,
    invariant_scatter as invariant_scatter,
    invariant_share as invariant_share,
)
from gpudist.nn.tensor_parallel.linear import (
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
)
from gpudist.nn.tensor_parallel.loss import (
    VocabParallelCrossEntropyLoss as VocabParallelCrossEntropyLoss,
)
from gpudist.nn.tensor_parallel.qkv import ParallelQKV as ParallelQKV
from gpudist.nn.tensor_parallel.region import sequence_lengths as sequence_lengths
from gpudist.nn.windowed.glu import DistributedGLU as DistributedGLU
from gpudist.nn.windowed.halo_region import HaloRegion as HaloRegion
from gpudist.nn.windowed.pad import (
    DistributedCircularPad1d as DistributedCircularPad1d,
    DistributedCircularPad2d as DistributedCircularPad2d,
    DistributedCircularPad3d as DistributedCircularPad3d,
    DistributedConstantPad1d as DistributedConstantPad1d,
    DistributedConstantPad2d as DistributedConstantPad2d,
    DistributedConstantPad3d as DistributedConstantPad3d,
    DistributedReflectionPad1d as DistributedReflectionPad1d,
    DistributedReflectionPad2d as DistributedReflectionPad2d,
    DistributedReflectionPad3d as DistributedReflectionPad3d,
    DistributedReplicationPad1d as DistributedReplicationPad1d,
    DistributedReplicationPad2d as DistributedReplicationPad2d,
    DistributedReplicationPad3d as DistributedReplicationPad3d,
    DistributedZeroPad1d as DistributedZeroPad1d,
    DistributedZeroPad2d as DistributedZeroPad2d,
    DistributedZeroPad3d as DistributedZeroPad3d,
)
from gpudist.nn.windowed.pixel_shuffle import (
    DistributedChannelShuffle as DistributedChannelShuffle,
    DistributedPixelShuffle as DistributedPixelShuffle,
    DistributedPixelUnshuffle as DistributedPixelUnshuffle,
)
from gpudist.nn.windowed.upsample import (
    DistributedUpsample as DistributedUpsample,
    DistributedUpsamplingBilinear2d as DistributedUpsamplingBilinear2d,
    DistributedUpsamplingNearest2d as DistributedUpsamplingNearest2d,
)
from gpudist.ops import (
    AllGather as AllGather,
    AllSumReduce as AllSumReduce,
    Broadcast as Broadcast,
    Gather as Gather,
    HaloExchange as HaloExchange,
    Repartition as Repartition,
    Scatter as Scatter,
    SendRecv as SendRecv,
    SumReduce as SumReduce,
    SumScatter as SumScatter,
)

__all__ = sorted(  # pyright: ignore[reportUnsupportedDunderAll]
    name
    for name, thing in globals().items()
    if not name.startswith("_") and (not isinstance(thing, types.ModuleType) or thing is utils)
)


def __dir__() -> list[str]:
    return __all__


if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.NoReturn:
        raise _MissingName(__name__, name)
