"""All-sum-reduce: the sum over some axes of a partition, on every worker. It is self-adjoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import PartitionError, PlanMismatch
from gpudist.exchange import Movement, bind
from gpudist.geometry.boxes import Plan
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.geometry.cartesian import index_of
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.operator import Operator, cached_operator, require_cartesian
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@operator("all_sum_reduce", lambda kind, P_x: kind(P_x, axes_reduce=[1]), (5, 4))
class AllSumReduce(Operator):
    """Sum blocks over axes of ``P_x``, on every worker; see :func:`all_sum_reduce`.

    Args:
        P_x ... shape: see :func:`all_sum_reduce`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        axes_reduce: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        self.axes = chosen_axes("AllSumReduce", P_x, axes_reduce, axes_keep)
        grid = tuple(1 if axis in self.axes else n for axis, n in enumerate(P_x.shape))
        super().__init__(
            P_x, P_x, None, True, global_shape, shape, grid,
            self._group_of,
        )  # fmt: skip
        self._P_sum = P_x.along(self.axes)

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        P_x, P_sum = self.P_x, self._P_sum
        assert P_x.rank is not None
        self._check(layout)
        members = [P_x.rank_of(world_rank) for world_rank in P_sum.ranks]
        key = ("all_sum_reduce", self.axes, P_x.shape, layout.key)
        plan: Plan = plan_all_sum_reduce(P_x.rank, members, layout.shape_of(P_x.rank), key)
        label = f"all_sum_reduce over axes {list(self.axes)} of {list(P_x.shape)}"
        return bind(plan, P_x, label, layout.dtype, x.shape, x.dtype)

    def _check(self, layout: BlockLayout) -> None:
        """Raise on every rank if blocks that are summed differ in shape."""
        first: dict[tuple[int, ...], tuple[int, ...]] = {}
        for rank in range(self.P_x.size):
            shape = layout.shape_of(rank)
            expected = first.setdefault(self._group_of(rank), shape)
            if shape != expected:
                raise PlanMismatch(
                    f"AllSumReduce: blocks that are summed over axes {list(self.axes)} of "
                    f"{list(self.P_x.shape)} have different shapes {list(expected)} and "
                    f"{list(shape)}"
                )

    def _group_of(self, rank: int) -> tuple[int, ...]:
        # The index of the first worker in the line or plane that ``rank`` is summed with.
        index = index_of(rank, self.P_x.shape)
        return tuple(0 if axis in self.axes else i for axis, i in enumerate(index))


def chosen_axes(
    name: str,
    P_x: CartesianPartition,
    axes: Sequence[int] | None,
    axes_keep: Sequence[int] | None,
) -> tuple[int, ...]:
    """Return the chosen axes, given directly or by the axes to keep."""
    require_cartesian(name, P_x)
    if (axes is None) == (axes_keep is None):
        raise PartitionError(f"{name}: give either the axes or axes_keep, not both")
    if axes is not None:
        return P_x.check_axes(axes)
    kept = P_x.check_axes(axes_keep or ())
    return tuple(axis for axis in range(P_x.dim) if axis not in kept)


def all_sum_reduce(
    x: Array,
    P_x: CartesianPartition,
    axes_reduce: Sequence[int] | None = None,
    axes_keep: Sequence[int] | None = None,
    *,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Sum blocks over axes of ``P_x``; every worker gets the sum over its line or plane of workers.

    Collective over ``P_x``. Sums are in ascending rank order and bitwise equal on the workers that
    share them.

    Args:
        x: this worker's block, a tensor or a NumPy or CuPy array; summed blocks have equal shapes.
        P_x: partition of the blocks.
        axes_reduce: axes of ``P_x`` to sum over, or
        axes_keep: axes not to sum over.
        global_shape: global shape of the sum, balanced over the axes that are kept; saves the
            agreement on the blocks.
        shape: ``"dynamic"`` makes the ranks agree at every call.

    Returns:
        New tensor, or array if ``x`` is one, of the shape of ``x``; a clone on workers outside
        ``P_x``.

    Adjoint:
        All-sum-reduce.

    Cost:
        One all-reduce of the block per group.

    Raises:
        PartitionError: on every rank alike, if an axis is out of range.
        PlanMismatch: on every rank alike, if blocks to be summed differ in shape.
        ShapeError: on every rank alike, if the dtype is bool.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(AllSumReduce, P_x, (axes_reduce, axes_keep, global_shape, shape))
    return apply_to_array(operator, x)
