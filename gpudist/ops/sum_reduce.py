"""Sum-reduce: sum blocks of P_x into the matching workers of P_y. Adjoint: broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.broadcasting import Pairing, format_grid, misfit
from gpudist.geometry.cartesian import index_of
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.broadcast import plan_between
from gpudist.ops.operator import Operator, cached_operator
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import Partition


@operator("broadcast", lambda kind, P_x: kind(P_x, P_x.grid(P_x.shape[0], 1)), (5, 4))
class SumReduce(Operator):
    """Sum the blocks of ``P_x`` into the matching workers of ``P_y``; see :func:`sum_reduce`.

    Args:
        P_x ... shape: see :func:`sum_reduce`.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        grids = P_y.shape, P_x.shape, transpose_dest, transpose_src
        problem = misfit(*grids, "P_y", "P_x")
        if problem is not None:
            raise PartitionError(
                f"SumReduce: P_x of shape {format_grid(P_x.shape, transpose_src)} does not reduce "
                f"to P_y of shape {format_grid(P_y.shape, transpose_dest)}: {problem}"
            )
        self.pairing = Pairing(*grids)
        super().__init__(
            P_x, P_y, None, preserve_batch, global_shape, shape, P_y.shape,
            lambda rank: index_of(self.pairing.source_of(rank), P_y.shape),
        )  # fmt: skip

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        self._check(layout)
        plan = plan_between(
            self.P_y, self.P_x, self.P_all, self.pairing,
            lambda root: layout.shape_of(self.pairing.targets_of(root)[0]), layout.key,
        ).T  # fmt: skip
        label = f"sum_reduce {list(self.P_x.shape)} -> {list(self.P_y.shape)}"
        empty = self.empty_shape(x)
        return bind(plan, self.P_all, label, layout.dtype, x.shape, x.dtype, empty)

    def _check(self, layout: BlockLayout) -> None:
        """Raise on every rank if summed blocks differ in shape, or if their dtype has no sum."""
        for root in range(self.P_y.size):
            first, *others = self.pairing.targets_of(root)
            if others and layout.dtype == torch.bool:
                raise ShapeError(
                    "SumReduce: torch.bool has no sum; convert to an integer dtype first"
                )
            for rank in others:
                if layout.shape_of(rank) != layout.shape_of(first):
                    raise PlanMismatch(
                        f"SumReduce: ranks {first} and {rank} of {list(self.P_x.shape)} are summed "
                        f"but their blocks are {list(layout.shape_of(first))} and "
                        f"{list(layout.shape_of(rank))}"
                    )


def sum_reduce(
    x: Array,
    P_x: Partition,
    P_y: Partition,
    transpose_src: bool = False,
    transpose_dest: bool = False,
    preserve_batch: bool = True,
    *,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Sum the blocks of ``P_x`` into the matching workers of ``P_y``.

    Collective over ``P_x`` and ``P_y``. The rules mirror those of :func:`~gpudist.broadcast`: the
    shape of ``P_y`` is left-padded with ones; each axis must then equal that of ``P_x`` or be 1,
    and blocks are summed along the axes where it is 1, in ascending rank order.

    Args:
        x: block on workers of ``P_x``, a tensor or a NumPy or CuPy array; a zero-volume placeholder
            elsewhere. Summed blocks have equal shapes.
        P_x, P_y: partitions of the blocks, and of the sums.
        transpose_src, transpose_dest: see :func:`~gpudist.broadcast`.
        preserve_batch: workers that are only in ``P_x`` get ``(batch, 0)`` instead of ``(0,)``.
        global_shape: global shape of the balanced sum on ``P_y``; saves the agreement on the
            blocks.
        shape: ``"dynamic"`` makes the ranks agree at every call; then placeholders are ignored, and
            an output requires grad iff a block of any worker does.

    Returns:
        New tensor, or array if ``x`` is one: the sum; a zero-volume tensor on workers outside
        ``P_y``; a clone of ``x`` on workers in neither partition.

    Adjoint:
        Broadcast of the sum's gradient to every block.

    Cost:
        One reduction of the block per group, all groups at once; 16-bit blocks are summed in
        float32 and rounded once.

    Raises:
        PartitionError: on every rank alike, if ``P_x`` does not reduce to ``P_y``.
        PlanMismatch: on every rank alike, if blocks to be summed differ in shape.
        ShapeError: on every rank alike, if the dtype is bool.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(
        SumReduce, P_x, (P_y, transpose_src, transpose_dest, preserve_batch, global_shape, shape)
    )
    return apply_to_array(operator, x)
