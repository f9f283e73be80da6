"""Drop-in distributed layers, and the primitives as modules."""

from gpudist.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d
from gpudist.nn.invariant import invariant_copy, invariant_sum
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
    "DistributedBCELoss",
    "DistributedBCEWithLogitsLoss",
    "DistributedConv1d",
    "DistributedConv2d",
    "DistributedConv3d",
    "DistributedCosineEmbeddingLoss",
    "DistributedCrossEntropyLoss",
    "DistributedGaussianNLLLoss",
    "DistributedHingeEmbeddingLoss",
    "DistributedHuberLoss",
    "DistributedKLDivLoss",
    "DistributedL1Loss",
    "DistributedLinear",
    "DistributedMSELoss",
    "DistributedMaxPool1d",
    "DistributedMaxPool2d",
    "DistributedMaxPool3d",
    "DistributedNLLLoss",
    "DistributedPoissonNLLLoss",
    "DistributedSmoothL1Loss",
    "DistributedSoftMarginLoss",
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
