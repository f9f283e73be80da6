"""Boxing: convert a global tensor to another layout by one differentiable movement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from gpudist.errors import ShapeError
from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import apply, move
from gpudist.exchange.tracing import is_immediate, is_recorded
from gpudist.geometry.layout import Layout
from gpudist.geometry.routes import least_volume, plan, route, volume
from gpudist.world.partition import Partition, cache_in_world


def box(x: torch.Tensor, source: Layout, target: Layout, P_world: Partition) -> torch.Tensor:
    """Return this rank's part of a global tensor in the layout ``target``.

    Collective over the ranks of both layouts.

    Args:
        x: this rank's part in the layout ``source``; a placeholder of shape ``(0,)`` on ranks
            without one.
        source: layout of ``x``.
        target: layout of the result, of the same global shape.
        P_world: world whose ranks the layouts name.

    Returns:
        ``x`` itself if the layouts are equal or on one and the same rank alone, else a new tensor;
        a placeholder on ranks without a part.

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
    """Return the movement of a boxing on this rank; ``None`` if this rank takes no part."""
    if source == target or P_world.rank not in (*source.ranks, *target.ranks):
        return None
    if len(source.ranks) == 1 and source.ranks == target.ranks:
        # The only block, copy or term is the tensor.
        return None
    return _bind(P_world, dtype, source, target)


@cache_in_world
def _bind(P_world: Partition, dtype: torch.dtype, source: Layout, target: Layout) -> Movement:
    members = tuple(sorted({*source.ranks, *target.ranks}))
    P_all = P_world.create_partition_inclusive(members)
    label = f"boxing of {list(source.shape)}, {source.sbp} -> {target.sbp}"
    plan_of_rank = plan(source, target, P_world.plan_rank, members)
    return bind(plan_of_rank, P_all, label, dtype, (0,), dtype)


def boxed_bytes(source: Layout, target: Layout, dtype: torch.dtype) -> int:
    """Return the number of bytes that a boxing moves between ranks, over all of them."""
    return 0 if source == target else volume(route(source, target)) * dtype.itemsize


def least_bytes(source: Layout, target: Layout, dtype: torch.dtype) -> int:
    """Return a lower bound of ``boxed_bytes``, computed without searching for a route."""
    return 0 if source == target else least_volume(source, target) * dtype.itemsize


class _DeclaredBackward(torch.autograd.Function):
    """Autograd function whose backward runs declared movements rather than the adjoint."""

    ends_search = True

    @staticmethod
    def forward(
        x: torch.Tensor, there: Sequence[Movement], back: Sequence[Movement]
    ) -> torch.Tensor:
        return _move_along(x, there) if there else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, _, ctx.back = inputs
        ctx.save_for_backward(x.new_empty(0))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, *gradients: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, None, None]:
        _ = ctx.saved_tensors
        # A function may return no gradient, on every rank.
        g = gradients[0]
        return None if g is None else _move_along(g, ctx.back), None, None


def _move_along(x: torch.Tensor, movements: Sequence[Movement]) -> torch.Tensor:
    for movement in movements:
        # A rank that has a block but takes no part in this movement passes a placeholder.
        part = x if tuple(x.shape) == movement.input_shape else x.reshape(-1)[:0]
        (x,) = move((movement,), (part,))
    return x


def box_both_ways(
    x: torch.Tensor, there: Sequence[Layout], back: Sequence[Layout], P_world: Partition
) -> torch.Tensor:
    """Box ``x`` along the layouts of ``there``, and its gradient along the layouts of ``back``.

    The caller is responsible for the gradient: ``back`` may differ from the adjoint of ``there``.

    Raises:
        ShapeError: called with gradients while a graph is recorded, which would use the adjoint of
            the recorded movements.
    """
    if is_recorded() and not is_immediate(x):
        if x.requires_grad and torch.is_grad_enabled():
            raise ShapeError(
                "this gradient is declared in another layout than the adjoint's, which a recorded "
                "graph cannot express; call the network outside torch.compile and gpudist.compiled"
            )
        for ends in pairwise(there):
            x = box(x, *ends, P_world)
        return x
    ways = [
        [m for ends in pairwise(way) if (m := movement_of(x.dtype, *ends, P_world)) is not None]
        for way in (there, back)
    ]
    if len(there[0].ranks) == 1 and not any(ways):
        return x.view_as(x)
    return apply(_DeclaredBackward, x, *ways)
