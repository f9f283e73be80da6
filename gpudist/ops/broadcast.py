"""Broadcast: copy each block of P_x to the matching workers of P_y."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gpudist.errors import PartitionError
from gpudist.exchange import Movement, bind
from gpudist.geometry.boxes import Plan
from gpudist.geometry.broadcasting import Pairing, format_grid, misfit, plan_broadcast
from gpudist.ops.arrays import Array, apply_to_array
from gpudist.ops.headers import SourceHeaders
from gpudist.ops.operator import Operator, cached_operator
from gpudist.ops.operators import operator
from gpudist.ops.shape_agreement import BlockLayout, ShapeMode
from gpudist.world.partition import Partition


@operator("sum_reduce", lambda kind, P_x: kind(P_x.grid(P_x.shape[0], 1), P_x), (5, 3))
class Broadcast(Operator):
    """Copy each block of ``P_x`` to the matching workers of ``P_y``; see :func:`broadcast`.

    Args:
        P_x ... shape: see :func:`broadcast`.
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
        grids = P_x.shape, P_y.shape, transpose_src, transpose_dest
        problem = misfit(*grids, "P_x", "P_y")
        if problem is not None:
            raise PartitionError(
                f"{type(self).__name__}: P_x of shape {format_grid(P_x.shape, transpose_src)} "
                f"does not broadcast to P_y of shape "
                f"{format_grid(P_y.shape, transpose_dest)}: {problem}"
            )
        self.pairing = Pairing(*grids)
        super().__init__(P_x, P_y, None, preserve_batch, global_shape, shape)
        if shape == "dynamic":
            source = self.pairing.source_of(P_y.rank) if P_y.rank is not None else None
            name = type(self).__name__
            self.agree_by(SourceHeaders(name, P_x, self.P_all, source, self._bind_headers))

    def _bind_headers(self, length: int) -> Movement:
        plan = plan_between(
            self.P_x, self.P_y, self.P_all, self.pairing, lambda _: (length,), "headers"
        )
        label = f"headers of {type(self).__name__} {list(self.P_x.shape)} -> {list(self.P_y.shape)}"
        return bind(plan, self.P_all, label, torch.int64, (0,), torch.int64)

    def _bind(self, layout: BlockLayout, x: torch.Tensor) -> Movement:
        plan = plan_between(
            self.P_x, self.P_y, self.P_all, self.pairing, layout.shape_of, layout.key
        )
        label = f"broadcast {list(self.P_x.shape)} -> {list(self.P_y.shape)}"
        empty = self.empty_shape(x)
        return bind(plan, self.P_all, label, layout.dtype, x.shape, x.dtype, empty)


def plan_between(
    P_root: Partition,
    P_group: Partition,
    P_all: Partition,
    pairing: Pairing,
    shape_of: Callable[[int], tuple[int, ...]],
    key: object,
) -> Plan:
    """Return this rank's plan of a broadcast from ``P_root`` to ``P_group``, in ranks of ``P_all``.

    ``shape_of`` returns the shape of the block of a rank of ``P_root``; ``key`` identifies all of
    these shapes.
    """

    def on_all(P: Partition, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(P_all.rank_of(P.ranks[rank]) for rank in ranks)

    source = pairing.source_of(P_group.rank) if P_group.rank is not None else None
    targets = pairing.targets_of(P_root.rank) if P_root.rank is not None else None
    return plan_broadcast(
        rank=P_all.plan_rank,
        targets=on_all(P_group, targets) if targets is not None else None,
        source=on_all(P_root, [source])[0] if source is not None else None,
        source_targets=on_all(P_group, pairing.targets_of(source)) if source is not None else (),
        input_shape=shape_of(P_root.rank) if P_root.rank is not None else None,
        output_shape=shape_of(source) if source is not None else None,
        key=("broadcast", pairing, P_root.digest, P_group.digest, key),
    )


def broadcast(
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
    """Copy each block of ``P_x`` to the matching workers of ``P_y``.

    Collective over ``P_x`` and ``P_y``. The shape of ``P_x`` is left-padded with ones; each axis
    must then equal ``P_y``'s or be 1, and blocks are copied along the axes where it is 1.

    Args:
        x: block on workers of ``P_x``, a tensor or a NumPy or CuPy array; a zero-volume placeholder
            elsewhere.
        P_x, P_y: partitions of the blocks, and of the copies.
        transpose_src, transpose_dest: whether to reverse that partition's shape before padding it;
            tensors are not transposed. Workers then match over the axes where the two shapes are
            equal: workers of a transposed partition are numbered in column-major order of the
            reversed index, others in row-major order, and equal numbers match. For example, from
            ``[3, 4]`` to ``[4, 3]`` with ``transpose_src``, each block is sent to the worker of
            equal rank, which differs from NumPy's transpose.
        preserve_batch: workers that are only in ``P_x`` get ``(batch, 0)`` instead of ``(0,)``.
        global_shape: global shape of the balanced tensor on ``P_x``; saves the agreement on the
            blocks.
        shape: ``"dynamic"`` makes each source send its block's shape to the receivers at every
            call; then size, dtype and number of dims may change, placeholders are ignored, and an
            output requires grad iff its source does. ``"static"`` raises for changes that a
            placeholder cannot show.

    Returns:
        New tensor, or array if ``x`` is one: the copy; a zero-volume tensor on workers outside
        ``P_y``; a clone of ``x`` on workers in neither partition.

    Adjoint:
        Sum-reduce of the copies into the block.

    Cost:
        One broadcast of the block per group, all groups at once. With ``"dynamic"``, a message of
        104 bytes before it, for which receivers wait and sources do not.

    Raises:
        PartitionError: on every rank alike, if ``P_x`` does not broadcast to ``P_y``.
        PlanMismatch: on every rank, if a static block changes in a way its receivers cannot know,
            or a worker of both partitions sends and receives blocks of different dtypes.

    Source:
        Hewett & Grady 2020, arXiv:2006.03108, section 3.
    """
    operator = cached_operator(
        Broadcast, P_x, (P_y, transpose_src, transpose_dest, preserve_batch, global_shape, shape)
    )
    return apply_to_array(operator, x)
