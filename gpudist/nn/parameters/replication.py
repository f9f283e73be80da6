"""Parameters that several workers hold, and the sums of their gradients over these workers.

A replicated parameter is one value that counts once, as a loss does: the sum of its gradient over
the workers that hold it is the gradient on each of them. Its copies come from one node of the
graph, whose backward is that sum. Autograd runs the nodes of a graph in the reverse of the order in
which they were made; so where one node is made for all layers before any of them runs, its backward
comes after all of theirs, on every rank alike. Accumulated gradients, ``torch.autograd.grad`` and
gradients of gradients need nothing more. Hooks on the parameters, or a callback at the end of
backward, would have to tell what a backward adds to ``grad``, and miss gradients that go elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.errors import ConventionError
from gpudist.exchange import Movement, bind, start
from gpudist.exchange.autograd import apply, has_tangents, is_eager, moved
from gpudist.exchange.library import has_modes, is_recorded
from gpudist.geometry.broadcasting import plan_all_sum_reduce
from gpudist.nn.parameters.buckets import BUCKET_BYTES, joined, messages
from gpudist.nn.parameters.placement import Placement
from gpudist.nn.tensor_parallel.invariant import copy_once
from gpudist.ops.agreement import refuse
from gpudist.world.partition import Partition


class Place(NamedTuple):
    """A parameter's number, the same on all ranks, and the workers its gradient is summed over.

    ``None`` stands for this one alone.
    """

    number: int
    holders: Partition | None


def holders_of(placement: Placement) -> Partition | None:
    """The workers that hold the same cells as this one, ``None`` if there is no other."""
    P = placement.P
    if not P.active or not placement.is_replicated:
        return None
    same = P.along([axis for axis in range(P.dim) if axis not in placement.axes])
    # In one order whatever the grid, so that layers on different grids are summed together.
    return P.world.create_partition_inclusive(sorted(same.ranks))


def copies_of(
    parameters: Sequence[torch.Tensor],
    holders: Sequence[Partition | None],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[torch.Tensor]:
    """The parameters, as one node whose backward sums their gradients over their holders.

    Collective over the holders in backward. No memory is copied.

    Args:
        parameters: of layers, the same list on all ranks; placeholders included.
        holders: for each one the workers that hold the same cells, ``None`` for this one alone.
        bucket_bytes: the most that small gradients are copied together.

    Adjoint:
        By declaration the all-sum, and the identity in double backward. A parameter without a
        gradient has none afterwards, on all of its holders alike.

    Cost:
        None; backward one group of messages for each set of holders and dtype: an all-reduce of
        the small gradients of each bucket together, and one of each large gradient. Over NCCL each
        is a group of its own on a second stream: a bucket is copied together while the one before
        is summed. On a CPU nothing overlaps.
    """
    copies = list(parameters)
    held = [(i, P) for i, P in enumerate(holders) if P is not None]
    if is_recorded():
        for i, P in held:
            copies[i] = copy_once(copies[i], P)
        return copies
    learns = torch.is_grad_enabled()
    places = [
        Place(i, P) for i, P in held if (learns and copies[i].requires_grad) or not is_eager()
    ]
    if places:
        found = apply(
            _Copy, tuple(places), bucket_bytes, *[copies[place.number] for place in places]
        )
        for place, copy in zip(places, found, strict=True):
            copies[place.number] = copy
    return copies


class _Copy(torch.autograd.Function):
    ends_search = True

    @staticmethod
    def forward(
        places: tuple[Place, ...], bucket_bytes: int, *parameters: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        # Nothing is saved, so that checkpointing may find a layer with a node of its own when it
        # recomputes, outside of the forward that handed out the copies. What uses a copy saves.
        ctx.places, ctx.bucket_bytes = inputs[:2]
        ctx.unknown = {}
        # Of tangents, some parameters may have one and some none.
        ctx.set_materialize_grads(has_tangents())

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([tangent.view_as(tangent) for tangent in tangents[2:]])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        results = list(gradients)
        found = [i for i, gradient in enumerate(gradients) if gradient is not None]
        _refuse_unknown(ctx, found)
        given = [i for i in found if ctx.places[i].holders is not None]
        if given:
            places = tuple([ctx.places[i] for i in given])
            sums = apply(_Sum, places, ctx.bucket_bytes, *[gradients[i] for i in given])
            for i, total in zip(given, sums, strict=True):
                results[i] = total
        return None, None, *results


def _refuse_unknown(ctx: Any, given: Sequence[int]) -> None:
    """Refuse gradients of which nobody knows over whom to sum them; see :mod:`.plain_sums`."""
    for i in given:
        if i in ctx.unknown:
            # Such a parameter keeps its first holders.
            refuse(ctx.places[i].holders, ConventionError(ctx.unknown[i]))


class _Sum(torch.autograd.Function):
    ends_search = True

    @staticmethod
    def forward(
        places: tuple[Place, ...], bucket_bytes: int, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return sums_of(places, gradients, bucket_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.places, ctx.bucket_bytes = inputs[:2]

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return apply(_Sum, ctx.places, ctx.bucket_bytes, *tangents[2:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *apply(_Copy, ctx.places, ctx.bucket_bytes, *gradients)


def sums_of(
    places: Sequence[Place], gradients: Sequence[torch.Tensor], bucket_bytes: int = BUCKET_BYTES
) -> tuple[torch.Tensor, ...]:
    """The gradients summed over their holders; not differentiable.

    Every rank goes through the sets of holders in the order of the parameters' numbers: no two
    ranks wait for each other in turn.
    """
    alike: dict[tuple[Partition | None, torch.dtype], list[int]] = {}
    for i, (place, gradient) in enumerate(zip(places, gradients, strict=True)):
        alike.setdefault((place.holders, gradient.dtype), []).append(i)
    sums = list(gradients)
    for (holders, dtype), chosen in alike.items():
        assert holders is not None
        parts = messages({i: gradients[i].nbytes for i in chosen}, bucket_bytes)
        movements = [
            _bind_sum(holders, dtype, tuple((places[i].number, gradients[i].shape) for i in part))
            for part in parts
        ]
        totals = _carried_out(movements, (joined([gradients[i] for i in part]) for part in parts))
        for part, total in zip(parts, totals, strict=True):
            pieces = total.split([gradients[i].numel() for i in part])
            for i, piece in zip(part, pieces, strict=True):
                sums[i] = piece.view(gradients[i].shape)
    return tuple(sums)


def _carried_out(
    movements: Sequence[Movement], blocks: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """The blocks moved; where there are streams, the next is made while one is on its way."""
    if has_modes() or not movements[0].steps[0].partition.wire.has_streams:
        return moved(movements, list(blocks))
    started = [start([m], [block]) for m, block in zip(movements, blocks, strict=True)]
    return tuple([in_flight.wait(0) for in_flight in started])


@lru_cache(maxsize=4096)
def _bind_sum(
    holders: Partition, dtype: torch.dtype, parts: tuple[tuple[int, tuple[int, ...]], ...]
) -> Movement:
    """The all-sum of gradients, one after the other, with these numbers and shapes."""
    cells = (sum(prod(shape) for _, shape in parts),)
    assert holders.rank is not None
    plan = plan_all_sum_reduce(holders.rank, range(holders.size), cells, ("gradients", parts))
    which = f"{len(parts)} gradients (parameters {parts[0][0]} to {parts[-1][0]})"
    label = f"sum of {which} over {holders.size} workers"
    return bind(plan, holders, label, dtype, cells, dtype)
