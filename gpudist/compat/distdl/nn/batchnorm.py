"""Batch normalization with DistDL's arguments."""

from __future__ import annotations

import torch

from gpudist import nn
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition


class DistributedBatchNorm(nn.DistributedBatchNorm):
    """Batch normalization of a tensor split over ``P_x`` along any dims.

    See :class:`gpudist.nn.DistributedBatchNorm`. The input's blocks may change at every call.

    Args:
        P_x: partition of input and output; axis 1 splits the channels.
        num_features, eps, momentum, affine, track_running_stats: see torch's layer; the number of
            channels is global.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(
            P_x.partition, num_features, eps, momentum, affine, track_running_stats,
            shape="dynamic",
        )  # fmt: skip

    @property
    def gamma(self) -> torch.nn.Parameter | None:
        """The weight."""
        return self.weight

    @property
    def beta(self) -> torch.nn.Parameter | None:
        """The bias."""
        return self.bias
