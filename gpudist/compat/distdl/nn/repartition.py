"""Repartition with DistDL's arguments."""

from __future__ import annotations

from gpudist import ops
from gpudist.compat.distdl.backends.mpi.buffer import MPIBufferManager
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition


class Repartition(ops.Repartition):
    """Move a tensor from blocks on ``P_x`` to balanced blocks on ``P_y``.

    See :func:`gpudist.repartition`. Blocks may change at every call.

    Args:
        P_x, P_y, preserve_batch: see :func:`gpudist.repartition`.
        buffer_manager: ignored.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        P_y: MPICartesianPartition,
        preserve_batch: bool = True,
        buffer_manager: MPIBufferManager | None = None,
    ) -> None:
        super().__init__(P_x.partition, P_y.partition, preserve_batch, shape="dynamic")
