"""Sum-reduce with DistDL's arguments."""

from __future__ import annotations

from gpudist import ops
from gpudist.compat.distdl.backends.mpi.partition import MPIPartition


class SumReduce(ops.SumReduce):
    """Sum blocks of ``P_x`` into the matching workers of ``P_y``; see :func:`gpudist.sum_reduce`.

    Blocks may change at every call.

    Args:
        P_x, P_y, transpose_src, transpose_dest, preserve_batch: see :func:`gpudist.sum_reduce`.
    """

    def __init__(
        self,
        P_x: MPIPartition,
        P_y: MPIPartition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
    ) -> None:
        super().__init__(
            P_x.partition, P_y.partition, transpose_src, transpose_dest, preserve_batch,
            shape="dynamic",
        )  # fmt: skip
