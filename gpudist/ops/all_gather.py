"""All-gather and its adjoint, sum-scatter: every worker gets all blocks along some axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.geometry.blocks import Decomposition
from gpudist.geometry.repartition import plan_all_gather
from gpudist.ops.all_sum_reduce import chosen_axes
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.operator import Operator, cached_operator, own_index
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import CartesianPartition


@operator("sum_scatter", lambda kind, P_x: kind(P_x, axes=[1]), (5, 3))
class AllGather(Operator):
    """Gather the blocks along axes of ``P_x`` on every worker; see :func:`all_gather`.

    Args:
        P_x ... shape: see :func:`all_gather`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        axes: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        self.axes = chosen_axes("AllGather", P_x, axes, axes_keep)
        super().__init__(P_x, P_x, P_x.dim, True, global_shape, shape)

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        plan = plan_all_gather(layout.decomposition, self.axes, own_index(self.P_x))
        label = f"all_gather over axes {list(self.axes)} of {list(self.P_x.shape)}"
        return bind(plan, self.P_x, label, layout.dtype, x.shape, x.dtype)


@operator("all_gather", lambda kind, P_x: kind(P_x, axes=[1]), (5, 6))
class SumScatter(Operator):
    """Sum tensors over axes of ``P_x`` and keep one balanced block; see :func:`sum_scatter`.

    Args:
        P_x ... shape: see :func:`sum_scatter`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        axes: Sequence[int] | None = None,
        axes_keep: Sequence[int] | None = None,
        *,
        shape: ShapeMode = "static",
    ) -> None:
        self.axes = chosen_axes("SumScatter", P_x, axes, axes_keep)
        super().__init__(P_x, P_x, P_x.dim, True, None, shape)

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        plan = plan_all_gather(self._target(layout), self.axes, own_index(self.P_x)).T
        label = f"sum_scatter over axes {list(self.axes)} of {list(self.P_x.shape)}"
        return bind(plan, self.P_x, label, layout.dtype, x.shape, x.dtype)

    def _target(self, layout: BlockLayout) -> Decomposition:
        """Return the decomposition of the sum, which is balanced along the summed axes."""
        cut = layout.decomposition
        extents: list[int] = []
        for d, blocks in enumerate(cut.dims):
            sizes = {blocks.length(i) for i in range(blocks.parts)}
            if d in self.axes and len(sizes) > 1:
                raise ShapeError(
                    f"SumScatter, dim {d}: workers along a summed axis must hold tensors of "
                    f"equal size, but these have {sorted(sizes)} cells"
                )
            extents.append(sizes.pop() if d in self.axes else blocks.extent)
        balanced = Decomposition.balanced(extents, cut.grid)
        return Decomposition(
            tuple(
                balanced.dims[d] if d in self.axes else blocks for d, blocks in enumerate(cut.dims)
            )
        )


def all_gather(
    x: Array,
    P_x: CartesianPartition,
    axes: Sequence[int] | None = None,
    axes_keep: Sequence[int] | None = None,
    *,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Gather the blocks along axes of ``P_x`` on every worker.

    Collective over ``P_x``.

    Args:
        x: this worker's block, a tensor or a NumPy or CuPy array; blocks may have any sizes that
            form a decomposition of one tensor.
        P_x: partition with one axis per dim of the tensor.
        axes: axes to gather along, or
        axes_keep: axes along which the tensor stays split.
        global_shape: global shape of the balanced tensor; saves the agreement on the blocks.
        shape: ``"dynamic"`` makes the ranks agree at every call.

    Returns:
        New tensor, or array if ``x`` is one: whole along the gathered dims. A clone of ``x`` on
        workers outside ``P_x``.

    Adjoint:
        Sum-scatter.

    Cost:
        This worker's block to each other worker along the axes, all in flight together.

    Raises:
        PartitionError: on every rank alike, if an axis is out of range.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(AllGather, P_x, (axes, axes_keep, global_shape, shape))
    return apply_to_array(operator, x)


def sum_scatter(
    x: Array,
    P_x: CartesianPartition,
    axes: Sequence[int] | None = None,
    axes_keep: Sequence[int] | None = None,
    *,
    shape: ShapeMode = "static",
) -> Array:
    """Sum tensors over axes of ``P_x``; each worker keeps one balanced block of the sum.

    Collective over ``P_x``. Sums are in ascending rank order.

    Args:
        x: the tensor to sum, or a NumPy or CuPy array, whole along the summed dims.
        P_x: partition with one axis per dim of the tensor.
        axes: axes to sum over, or
        axes_keep: axes not to sum over.
        shape: ``"dynamic"`` makes the ranks agree at every call.

    Returns:
        New tensor, or array if ``x`` is one: this worker's block of the sum. A clone of ``x`` on
        workers outside ``P_x``.

    Adjoint:
        All-gather.

    Cost:
        One block to each other worker along the axes, all in flight together.

    Raises:
        PartitionError: on every rank alike, if an axis is out of range.
        ShapeError: if tensors to be summed differ in shape, or the dtype is bool.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(SumScatter, P_x, (axes, axes_keep, shape))
    return apply_to_array(operator, x)
