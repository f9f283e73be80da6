"""Boxing: a global tensor from one layout to another, by one movement with an exact adjoint."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import apply, move
from gpudist.exchange.library import is_recorded
from gpudist.ops.bound import Recent
from gpudist.sbp.attributes import dual
from gpudist.sbp.layout import Layout
from gpudist.sbp.routes import least_volume, plan, route, volume
from gpudist.world.partition import Partition

_REMEMBERED_BOXINGS = 4096


def box(x: torch.Tensor, source: Layout, target: Layout, P_world: Partition) -> torch.Tensor:
    """This rank's part of a global tensor in the layout ``target``.

    Collective over the ranks of both layouts.

    Args:
        x: its part in the layout ``source``; a placeholder of shape ``(0,)`` where it has none.
        source, target: of the same global shape.
        P_world: the world whose ranks the layouts name.

    Returns:
        ``x`` itself if the layouts are equal, else a new tensor; a placeholder on ranks without a
        part.

    Adjoint:
        The movement back, from the dual of ``target`` to the dual of ``source``.

    Cost:
        ``boxed_bytes``; at most two sets of messages.
    """
    movement = movement_of(x.dtype, source, target, P_world)
    return x if movement is None else move((movement,), (x,))[0]


def movement_of(
    dtype: torch.dtype, source: Layout, target: Layout, P_world: Partition
) -> Movement | None:
    """What carries out a boxing on this rank; ``None`` if nothing changes here or anywhere."""
    if source == target or P_world.rank not in (*source.ranks, *target.ranks):
        return None
    remembered: Any = P_world.wire.remembered
    recent: Recent[Movement] = remembered.setdefault("boxings", Recent(_REMEMBERED_BOXINGS))
    return recent((source, target, dtype), lambda: _bound(dtype, source, target, P_world))


def _bound(dtype: torch.dtype, source: Layout, target: Layout, P_world: Partition) -> Movement:
    assert P_world.rank is not None
    members = tuple(sorted({*source.ranks, *target.ranks}))
    P_all = P_world.create_partition_inclusive(members)
    label = f"boxing of {list(source.shape)}, {source.sbp} -> {target.sbp}"
    own = plan(source, target, P_world.rank, members)
    return bind(own, P_all, label, dtype, (0,), dtype)


def boxed_bytes(source: Layout, target: Layout, dtype: torch.dtype) -> int:
    """Bytes that a boxing moves between ranks, over all of them."""
    return 0 if source == target else volume(route(source, target)) * dtype.itemsize


def least_bytes(source: Layout, target: Layout, dtype: torch.dtype) -> int:
    """A bound of ``boxed_bytes`` from below, which takes no search."""
    return 0 if source == target else least_volume(source, target) * dtype.itemsize


class _Declared(torch.autograd.Function):
    """A movement, or none, whose backward is other ones, by declaration."""

    ends_search = True

    @staticmethod
    def forward(
        x: torch.Tensor, there: Sequence[Movement], back: Sequence[Movement]
    ) -> torch.Tensor:
        return _moved(x, there) if there else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, _, ctx.back = inputs
        ctx.save_for_backward(x.new_empty(0))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        _ = ctx.saved_tensors
        return _moved(gradients[0], ctx.back), None, None


def _moved(x: torch.Tensor, movements: Sequence[Movement]) -> torch.Tensor:
    for movement in movements:
        # A rank with a block that takes no part gives a placeholder.
        given = x if tuple(x.shape) == movement.input_shape else x.reshape(-1)[:0]
        (x,) = move((movement,), (given,))
    return x


def declared(
    x: torch.Tensor, there: Sequence[Layout], back: Sequence[Layout], P_world: Partition
) -> torch.Tensor:
    """``x`` boxed from each layout of ``there`` to the next, and its gradient by those of ``back``.

    The second is no adjoint of the first: who calls this says so by name.

    Raises:
        ShapeError: while a graph is recorded, which would differentiate what is recorded.
    """
    if is_recorded():
        raise ShapeError(
            "a gradient that is declared to lie otherwise than its tensor cannot be recorded in a "
            "graph; call the network itself"
        )
    ways = [
        [m for ends in pairwise(way) if (m := movement_of(x.dtype, *ends, P_world)) is not None]
        for way in (there, back)
    ]
    return apply(_Declared, x, *ways)


def gradient_layout(layout: Layout) -> Layout:
    """That of the gradient of a tensor."""
    return Layout(layout.ranks, layout.grid, dual(layout.sbp), layout.shape)
