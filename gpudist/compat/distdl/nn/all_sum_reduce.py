"""All-sum-reduce with DistDL's arguments."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist import ops
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition


class AllSumReduce(ops.AllSumReduce):
    """Sum blocks over axes of ``P_x``, for every worker; see :func:`gpudist.all_sum_reduce`.

    Blocks may change at every call.

    Args:
        P_x, axes_reduce, axes_keep: see :func:`gpudist.all_sum_reduce`.
    """

    def __init__(
        self,
        P_x: MPICartesianPartition,
        axes_reduce: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
    ) -> None:
        super().__init__(P_x.partition, axes_reduce, axes_keep, shape="dynamic")
