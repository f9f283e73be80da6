"""Repartition with DistDL's arguments."""

from __future__ import annotations

from typing import Any

from gpudist import ops
from gpudist.compat.distdl.adapter import MPIBufferManager
from gpudist.compat.distdl.partition import MPICartesianPartition
from gpudist.compat.distdl.slicing import range_index
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.boxes import intersection
from gpudist.world.partition import Partition

# Cells in this worker's block, their shape, and the rank that has the other copy or "self".
Overlap = tuple[tuple[slice, ...] | None, tuple[int, ...] | None, int | str | None]


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
        self._last: Decomposition | None = None

    def _bind_recent(self, layout: Any, x: Any) -> Any:
        self._last = layout.decomposition
        return super()._bind_recent(layout, x)

    @property
    def P_x_to_y_overlaps(self) -> list[Overlap]:
        """List of the cells that this worker's block of the input shares with the output's blocks.

        One entry per worker of ``P_y``: slices of this worker's block, their shape, and the rank of
        the other worker among those of ``P_x`` and ``P_y``, or ``"self"``; ``(None, None, None)``
        without common cells. Empty before the first call.
        """
        return self._overlaps(self.P_x, self.P_y, is_output=False)

    @property
    def P_y_to_x_overlaps(self) -> list[Overlap]:
        """List of the cells that this worker's block of the output shares with the input's."""
        return self._overlaps(self.P_y, self.P_x, is_output=True)

    def _overlaps(self, P: Partition, P_other: Partition, is_output: bool) -> list[Overlap]:
        if self._last is None or P.index is None:
            return []
        ends = [self._last, Decomposition.balanced(self._last.shape, self.P_y.shape)]
        blocks, others = reversed(ends) if is_output else ends
        block, overlaps = blocks.block(P.index), list[Overlap]()
        for rank, index in enumerate(range_index(P_other.shape)):
            shared = intersection(block, others.block(index))
            if shared is None:
                overlaps.append((None, None, None))
                continue
            partner = self.P_all.rank_of(P_other.ranks[rank])
            slices = shared.relative_to(block.start).slices
            overlaps.append(
                (slices, shared.shape, "self" if partner == self.P_all.rank else partner)
            )
        return overlaps
