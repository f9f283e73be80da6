"""Parameters that one worker each owns, and their copies on the workers that use them.

The copies for a whole network come from one node of the graph, made before any layer runs: one
group of broadcasts. Its backward, which autograd therefore runs last on every rank, is one group of
sum-reduces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import apply, has_tangents, is_eager, move, moved
from gpudist.exchange.library import is_recorded
from gpudist.geometry.broadcasting import Pairing
from gpudist.nn.parameters.buckets import BUCKET_BYTES, joined, messages
from gpudist.nn.parameters.parameter import bind_parameter
from gpudist.nn.parameters.placement import Placement
from gpudist.ops.broadcast import plan_between
from gpudist.world.partition import CartesianPartition, Partition


@dataclass(frozen=True)
class Spread:
    """The way of one parameter from the workers that own its blocks to those that use them.

    Attributes:
        name: of the parameter, the same on all ranks.
        owners: where its blocks are.
        P_use: the workers that use them; the grid of owners broadcasts to theirs.
        members: everybody who takes part in the layer, in ascending order.
    """

    name: str
    owners: Placement
    P_use: CartesianPartition
    members: Partition

    @classmethod
    def between(
        cls, name: str, owners: Placement, P_use: CartesianPartition, P_all: Partition
    ) -> Spread | None:
        """``None`` where every block is used by its owner alone, so that nothing moves."""
        if owners.P.ranks == P_use.ranks:
            return None
        members = P_all.world.create_partition_inclusive(sorted(P_all.ranks))
        return cls(name, owners, P_use, members)

    def bind(self, parameter: torch.Tensor) -> Movement:
        """The broadcast of this parameter alone."""
        owners = self.owners
        return bind_parameter(parameter, owners.P, self.P_use, owners.cut, self.name, owners.axes)

    @cached_property
    def owned_shape(self) -> tuple[int, ...]:
        """Of this worker's block, ``(0,)`` if it owns none."""
        box = self.owners.own_box
        return (0,) if box is None else box.shape

    @cached_property
    def used_shape(self) -> tuple[int, ...]:
        """Of the block that this worker uses, ``(0,)`` if it uses none."""
        P_owner, P_use = self.owners.P, self.P_use
        if P_use.rank is None:
            return (0,)
        return self.owners.box(Pairing(P_owner.shape, P_use.shape).source_of(P_use.rank)).shape

    @cached_property
    def largest_cells(self) -> int:
        """Of the first block, of which none is larger; the same on all ranks."""
        return prod(self.owners.box(0).shape)


class Moving(NamedTuple):
    """A parameter's number, the same on all ranks, and its way."""

    number: int
    spread: Spread


def copies_of_owned(
    parameters: Sequence[torch.Tensor],
    spreads: Sequence[Spread | None],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[torch.Tensor]:
    """The parameters as those who use them need them, moved as one node of the graph.

    Collective over the members of each spread: every rank goes through the sets of members in the
    order of the parameters' numbers, so that no two wait for each other in turn.

    Args:
        parameters: of layers, the same list on all ranks; placeholders included.
        spreads: the way of each one, ``None`` for those that stay where they are.
        bucket_bytes: the most that small ones are copied together.

    Returns:
        New tensors: copies of the blocks that this worker uses, placeholders for those it does not.

    Adjoint:
        Sum-reduces of the gradients to the owners. A parameter without a gradient has none
        afterwards, on all members alike.

    Cost:
        One group of messages for each set of members: a broadcast of all small parameters of one
        dtype with the same owners and users, and one of each large parameter; backward as many
        sum-reduces.
    """
    copies = list(parameters)
    moving = tuple(
        [
            Moving(i, spread)
            for i, spread in enumerate(spreads)
            if spread is not None and spread.members.active
        ]
    )
    if not moving:
        return copies
    tensors = [copies[number] for number, _ in moving]
    learns = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])
    if is_recorded():
        ways = zip(moving, tensors, strict=True)
        found = move([spread.bind(tensor) for (_, spread), tensor in ways], tensors)
    elif learns or not is_eager():
        found = apply(_Spread, moving, False, bucket_bytes, *tensors)
    else:
        found = _moved(moving, tensors, False, bucket_bytes)
    for (number, _), copy in zip(moving, found, strict=True):
        copies[number] = copy
    return copies


class _Spread(torch.autograd.Function):
    ends_search = True

    @staticmethod
    def forward(
        moving: tuple[Moving, ...], to_owners: bool, bucket_bytes: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return _moved(moving, tensors, to_owners, bucket_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        # Nothing is saved, so that checkpointing may find a layer that moves its own parameters
        # when it recomputes. What uses a copy saves.
        ctx.moving, ctx.to_owners, ctx.bucket_bytes = inputs[:3]
        # All members use a copy or none does; but of the gradients some may use one and some none.
        ctx.set_materialize_grads(ctx.to_owners or has_tangents())
        if has_tangents():
            return
        needed = zip(output, ctx.needs_input_grad[3:], strict=True)
        ctx.mark_non_differentiable(*(y for y, needs in needed if not needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return apply(_Spread, ctx.moving, ctx.to_owners, ctx.bucket_bytes, *tangents[3:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = zip(gradients, ctx.needs_input_grad[3:], strict=True)
        given = [i for i, (gradient, needs) in enumerate(needed) if needs and gradient is not None]
        results: list[torch.Tensor | None] = [None] * len(gradients)
        if given:
            moving = tuple([ctx.moving[i] for i in given])
            chosen = [gradients[i] for i in given]
            found = apply(_Spread, moving, not ctx.to_owners, ctx.bucket_bytes, *chosen)
            for i, gradient in zip(given, found, strict=True):
                results[i] = gradient
        return None, None, None, *results


def _moved(
    moving: Sequence[Moving],
    tensors: Sequence[torch.Tensor],
    to_owners: bool,
    bucket_bytes: int,
) -> tuple[torch.Tensor, ...]:
    """Blocks to those who use them, or gradients to the owners; not differentiable."""
    sets: dict[Partition, list[int]] = {}
    for i, (_, spread) in enumerate(moving):
        sets.setdefault(spread.members, []).append(i)
    results = list(tensors)
    for chosen in sets.values():
        parts = _messages(chosen, moving, tensors, bucket_bytes)
        movements: list[Movement] = []
        for part in parts:
            movement = _bind(tuple([moving[i] for i in part]), tensors[part[0]].dtype)
            movements.append(movement.T if to_owners else movement)
        blocks = [joined([tensors[i] for i in part]) for part in parts]
        for part, total in zip(parts, moved(movements, blocks), strict=True):
            spreads = [moving[i].spread for i in part]
            shapes = [s.owned_shape if to_owners else s.used_shape for s in spreads]
            pieces = total.split([prod(shape) for shape in shapes])
            for i, piece, shape in zip(part, pieces, shapes, strict=True):
                results[i] = piece.view(shape)
    return tuple(results)


def _messages(
    chosen: Sequence[int],
    moving: Sequence[Moving],
    tensors: Sequence[torch.Tensor],
    bucket_bytes: int,
) -> list[list[int]]:
    """Which parameters go together: of one dtype, with the same owners and users."""
    alike: dict[tuple[Partition, Partition, torch.dtype], dict[int, int]] = {}
    for i in chosen:
        spread, dtype = moving[i].spread, tensors[i].dtype
        key = (spread.owners.P, spread.P_use, dtype)
        alike.setdefault(key, {})[i] = spread.largest_cells * dtype.itemsize
    return [part for nbytes in alike.values() for part in messages(nbytes, bucket_bytes)]


@lru_cache(maxsize=4096)
def _bind(moving: tuple[Moving, ...], dtype: torch.dtype) -> Movement:
    """The broadcast of these parameters' blocks, one after the other."""
    first = moving[0].spread
    P_owner, P_use = first.owners.P, first.P_use
    P_both = P_owner.create_partition_union(P_use)
    ways = [(number, spread.name, spread.owners) for number, spread in moving]
    key = tuple([(number, name, owners.cut, owners.axes) for number, name, owners in ways])

    def shape_of(rank: int) -> tuple[int, ...]:
        return (sum(prod(owners.box(rank).shape) for _, _, owners in ways),)

    pairing = Pairing(P_owner.shape, P_use.shape)
    plan = plan_between(P_owner, P_use, P_both, pairing, shape_of, ("together", key))
    which = f"{len(moving)} parameters ({moving[0].number} to {moving[-1].number})"
    label = f"broadcast of {which} from {P_owner.size} to {P_use.size} workers"
    return bind(plan, P_both, label, dtype, (0,), dtype)
