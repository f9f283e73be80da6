"""Repartition: from one decomposition of a tensor to another, on the same or other workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import PartitionError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.cartesian import rank_of
from gpudist.geometry.repartition import plan_repartition
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.operator import Operator, cached_operator
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import Partition


@operator(
    "repartition",
    lambda kind, P_x: kind(P_x.grid(P_x.size, 1), P_x.grid(1, max(1, P_x.size - 1))),
    (6, 5),
)
class Repartition(Operator):
    """Convert the blocks on ``P_x`` to balanced blocks on ``P_y``; see :func:`repartition`.

    Args:
        P_x ... shape: see :func:`repartition`.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        preserve_batch: bool = True,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        if P_x.dim != P_y.dim:
            raise PartitionError(
                f"Repartition: P_x has shape {list(P_x.shape)} and P_y {list(P_y.shape)}; both "
                "need one axis per dim of the tensor"
            )
        super().__init__(P_x, P_y, P_x.dim, preserve_batch, global_shape, shape)

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        P_x, P_y, P_all = self.P_x, self.P_y, self.P_all
        source = layout.decomposition
        target = Decomposition.balanced(source.shape, P_y.shape)
        plan = plan_repartition(
            source,
            target,
            P_all.plan_rank,
            P_x.index,
            P_y.index,
            lambda index: P_all.rank_of(P_x.ranks[rank_of(index, P_x.shape)]),
            lambda index: P_all.rank_of(P_y.ranks[rank_of(index, P_y.shape)]),
            key=(P_x.digest, P_y.digest),
        )
        label = f"repartition {list(P_x.shape)} -> {list(P_y.shape)} of {list(source.shape)}"
        empty = self.empty_shape(x)
        return bind(plan, P_all, label, layout.dtype, x.shape, x.dtype, empty)


def repartition(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    preserve_batch: bool = True,
    *,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Convert a tensor from blocks on ``P_x`` to balanced blocks on ``P_y``.

    Collective over ``P_x`` and ``P_y``, which may share all, some or no workers.

    Args:
        x: block on workers of ``P_x``, a tensor or a NumPy or CuPy array; blocks may have any sizes
            that form a decomposition of one tensor. A zero-volume placeholder elsewhere.
        P_x, P_y: partitions of the input and the output, with one axis per dim of the tensor.
        preserve_batch: workers that are only in ``P_x`` get ``(batch, 0)`` instead of ``(0,)``.
        global_shape: global shape of the tensor, if its blocks on ``P_x`` are balanced; saves the
            agreement on them.
        shape: ``"dynamic"`` makes the ranks agree at every call; then placeholders are ignored, and
            an output requires grad iff a block of any worker does.

    Returns:
        New tensor, or array if ``x`` is one: the block on ``P_y``, empty if there are fewer cells
        than workers; a zero-volume tensor on workers outside ``P_y``; a clone of ``x`` on workers
        in neither partition.

    Adjoint:
        The reverse repartition.

    Cost:
        One message per worker whose block overlaps; each cell is sent at most once.

    Raises:
        PartitionError: if ``P_x`` and ``P_y`` have different numbers of axes.
        ShapeError: on every rank alike, if the blocks are not a decomposition of one tensor.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(Repartition, P_x, (P_y, preserve_batch, global_shape, shape))
    return apply_to_array(operator, x)
