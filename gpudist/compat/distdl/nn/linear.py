"""Linear layer with DistDL's arguments."""

from __future__ import annotations

from gpudist import nn
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition


class DistributedLinear(nn.DistributedLinear):
    """Linear layer whose input and output features are split.

    See :class:`gpudist.nn.DistributedLinear`. The input's blocks may change at every call.

    Args:
        P_x, P_y, P_w: partitions of input, output and weight, of shapes ``[1, fi]``, ``[1, fo]``
            and ``[fo, fi]``.
        in_features, out_features, bias: see torch's layer; sizes are global.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        P_y: MPICartesianPartition,
        P_w: MPICartesianPartition,
        in_features: int,
        out_features: int,
        bias: bool = True,
    ) -> None:
        super().__init__(
            P_x.partition, P_y.partition, P_w.partition, in_features, out_features, bias,
            shape="dynamic",
        )  # fmt: skip

    @property
    def sublinear(self) -> DistributedLinear:
        """This layer: DistDL keeps ``weight`` and ``bias`` in a layer within."""
        return self
