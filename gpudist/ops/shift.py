"""Shift: move every block to another worker of the grid, cyclically."""

from __future__ import annotations

from collections.abc import Sequence

from gpudist.errors import PartitionError
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.operator import cached_operator
from gpudist.ops.operators import operator
from gpudist.ops.send_recv import SendRecv
from gpudist.ops.shape_agreement import ShapeMode
from gpudist.world.partition import CartesianPartition


@operator("shift", lambda kind, P_x: kind(P_x, [1, 1]), (5, 3))
class Shift(SendRecv):
    """Move each block ``steps`` workers along the axes of ``P_x``; see :func:`shift`.

    Args:
        P_x ... shape: see :func:`shift`.
    """

    def __init__(
        self,
        P_x: CartesianPartition,
        steps: Sequence[int],
        preserve_batch: bool = True,
        *,
        global_shape: Sequence[int] | None = None,
        shape: ShapeMode = "static",
    ) -> None:
        if len(steps) != P_x.dim:
            raise PartitionError(
                f"Shift: steps is {list(steps)}; give one number for each of the {P_x.dim} axes of "
                f"P_x, which has shape {list(P_x.shape)}"
            )
        receivers: list[int] = []
        for rank in range(P_x.size):
            moved = zip(index_of(rank, P_x.shape), steps, P_x.shape, strict=True)
            receivers.append(rank_of([(i + step) % n for i, step, n in moved], P_x.shape))
        P_y = P_x.create_partition_inclusive(receivers)
        super().__init__(
            P_x,
            P_y.create_cartesian_topology_partition(P_x.shape),
            preserve_batch,
            global_shape=global_shape,
            shape=shape,
        )
        self.steps = tuple(steps)

    def extra_repr(self) -> str:
        return f"{list(self.P_x.shape)}, steps={list(self.steps)}"


def shift(
    x: Array,
    P_x: CartesianPartition,
    steps: Sequence[int],
    preserve_batch: bool = True,
    *,
    global_shape: Sequence[int] | None = None,
    shape: ShapeMode = "static",
) -> Array:
    """Move each worker's block ``steps`` workers along the axes of ``P_x``, cyclically.

    Collective over ``P_x``. Worker ``index`` sends its block to worker ``index + steps`` modulo the
    shape of ``P_x``. Blocks are moved as a whole: if all have the same extent, the result is the
    block of ``torch.roll(X, [step * extent ...])`` of the global tensor ``X``. Ring algorithms,
    such as Cannon's matrix product, consist of repeated shifts.

    Args:
        x: block on workers of ``P_x``, a tensor or a NumPy or CuPy array; a zero-volume placeholder
            elsewhere.
        P_x: partition of ``x``.
        steps: number of workers by which to move blocks, per axis of ``P_x``; may be negative, 0,
            or exceed the axis.
        preserve_batch, global_shape, shape: see :func:`gpudist.send_recv`.

    Returns:
        New tensor, or array if ``x`` is one: the received block, of the sender's shape.

    Adjoint:
        Shift by ``-steps``.

    Cost:
        One message per worker, or a copy if a block stays on its worker.

    Raises:
        PartitionError: on every rank alike, if ``steps`` does not have one number per axis.
        PlanMismatch: see :func:`~gpudist.broadcast`.

    Source:
        ``MPI_Cart_shift`` of the MPI 4.1 standard, section 8.5.6.
    """
    operator = cached_operator(Shift, P_x, (steps, preserve_batch, global_shape, shape))
    return apply_to_array(operator, x)
