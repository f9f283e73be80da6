"""Parameters with one owner each, and their copies on the workers that use them.

One autograd node, created before any layer runs, makes all copies for a network by one group of
broadcasts. Autograd therefore runs the backward of this node, one group of sum-reduces, last on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from math import prod
from typing import Any, NamedTuple

import torch

from gpudist.exchange import Movement, bind
from gpudist.exchange.autograd import apply, has_tangents, is_eager, move, move_without_node
from gpudist.exchange.tracing import is_recorded
from gpudist.geometry.broadcasting import Pairing
from gpudist.nn.parameters.buckets import BUCKET_BYTES, concatenate_cells, messages
from gpudist.nn.parameters.parameter import bind_parameter
from gpudist.nn.parameters.parameter_placement import ParameterPlacement
from gpudist.ops.broadcast import plan_between
from gpudist.world.partition import Partition, cache_in_world


@dataclass(frozen=True)
class ParameterBroadcast:
    """Broadcast of one parameter from the owners of its blocks to the workers that use them.

    Attributes:
        name: name of the parameter, the same on all ranks.
        owners: placement of its blocks.
        used: placement on the workers that use the blocks, to which the owners' grid is broadcast.
        members: all workers that take part in the layer, in ascending order.
    """

    name: str
    owners: ParameterPlacement
    used: ParameterPlacement
    members: Partition

    @classmethod
    def between(
        cls, name: str, owners: ParameterPlacement, used: ParameterPlacement, P_all: Partition
    ) -> ParameterBroadcast | None:
        """Return the broadcast, or ``None`` if every block is used only by its owner."""
        if owners.P.ranks == used.P.ranks:
            return None
        members = P_all.world.create_partition_inclusive(sorted(P_all.ranks))
        return cls(name, owners, used, members)

    def bind(self, dtype: torch.dtype) -> Movement:
        """Return the movement of this parameter alone."""
        return bind_parameter(self.owners, self.used.P, dtype, self.name)

    @cached_property
    def largest_cells(self) -> int:
        """Number of cells of the first block, which is the largest; the same on all ranks."""
        return prod(self.owners.box(0).shape)


class Moving(NamedTuple):
    """A parameter's number, the same on all ranks, and its broadcast."""

    number: int
    broadcast: ParameterBroadcast


def copies_of_owned(
    parameters: Sequence[torch.Tensor],
    broadcasts: Sequence[ParameterBroadcast | None],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[torch.Tensor]:
    """Broadcast parameters to the workers that use them, as one node of the graph.

    Collective over the members of each broadcast: every rank visits the sets of members in the
    order of the parameters' numbers, which prevents deadlock.

    Args:
        parameters: parameters of layers, including placeholders; the same list on all ranks.
        broadcasts: broadcast of each parameter, ``None`` for parameters that do not move.
        bucket_bytes: maximum bytes of small parameters copied into one message.

    Returns:
        New tensors: copies of the blocks that this worker uses, placeholders for all others.

    Adjoint:
        Sum-reduces of the gradients to the owners. A parameter that gets no gradient on any member
        has none afterwards.

    Cost:
        One group of messages per set of members: one broadcast of all small parameters with the
        same dtype, owners and users, and one of each large parameter. In backward, the same number
        of sum-reduces.
    """
    copies = list(parameters)
    moving = tuple(
        [
            Moving(i, broadcast)
            for i, broadcast in enumerate(broadcasts)
            if broadcast is not None and broadcast.members.active
        ]
    )
    if not moving:
        return copies
    tensors = [copies[number] for number, _ in moving]
    learns = torch.is_grad_enabled() and any([tensor.requires_grad for tensor in tensors])
    if is_recorded():
        ways = zip(moving, tensors, strict=True)
        copied = move([broadcast.bind(tensor.dtype) for (_, broadcast), tensor in ways], tensors)
    elif learns or not is_eager():
        copied = apply(_BroadcastParameters, moving, False, bucket_bytes, *tensors)
    else:
        copied = _move_in_buckets(moving, tensors, False, bucket_bytes)
    for (number, _), copy in zip(moving, copied, strict=True):
        copies[number] = copy
    return copies


class _BroadcastParameters(torch.autograd.Function):
    ends_search = True

    @staticmethod
    def forward(
        moving: tuple[Moving, ...], to_owners: bool, bucket_bytes: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return _move_in_buckets(moving, tensors, to_owners, bucket_bytes)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        # Save nothing: in a recomputation by checkpointing, the layer may move its own parameters
        # instead. Users of a copy save it.
        ctx.moving, ctx.to_owners, ctx.bucket_bytes = inputs[:3]
        # Either all members use a copy or none does, but only some may need its gradient.
        ctx.set_materialize_grads(ctx.to_owners or has_tangents())
        if has_tangents():
            return
        needed = zip(output, ctx.needs_input_grad[3:], strict=True)
        ctx.mark_non_differentiable(*(y for y, needs in needed if not needs))

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return apply(
            _BroadcastParameters, ctx.moving, ctx.to_owners, ctx.bucket_bytes, *tangents[3:]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = zip(gradients, ctx.needs_input_grad[3:], strict=True)
        moves = [needs and gradient is not None for gradient, needs in needed]
        if not any(moves):
            return (None,) * len(ctx.needs_input_grad)
        moving, to_owners = tuple(compress(ctx.moving, moves)), not ctx.to_owners
        chosen = compress(gradients, moves)
        moved = iter(apply(_BroadcastParameters, moving, to_owners, ctx.bucket_bytes, *chosen))
        return None, None, None, *[next(moved) if is_moving else None for is_moving in moves]


def _move_in_buckets(
    moving: Sequence[Moving],
    tensors: Sequence[torch.Tensor],
    to_owners: bool,
    bucket_bytes: int,
) -> tuple[torch.Tensor, ...]:
    """Move blocks to their users, or gradients to their owners; not differentiable."""
    sets: dict[Partition, list[int]] = {}
    for i, (_, broadcast) in enumerate(moving):
        sets.setdefault(broadcast.members, []).append(i)
    results = list(tensors)
    for members, chosen in sets.items():
        parts = _messages(chosen, moving, tensors, bucket_bytes)
        movements: list[Movement] = []
        for part in parts:
            which = tuple([moving[i] for i in part])
            movement = _bind(members, which, tensors[part[0]].dtype)
            movements.append(movement.T if to_owners else movement)
        blocks = [concatenate_cells([tensors[i] for i in part]) for part in parts]
        for part, total in zip(parts, move_without_node(movements, blocks), strict=True):
            broadcasts = [moving[i].broadcast for i in part]
            shapes = [(s.owners if to_owners else s.used).own_shape for s in broadcasts]
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
    alike: dict[tuple[Partition, Partition, torch.dtype], dict[int, int]] = {}
    for i in chosen:
        broadcast, dtype = moving[i].broadcast, tensors[i].dtype
        key = (broadcast.owners.P, broadcast.used.P, dtype)
        alike.setdefault(key, {})[i] = broadcast.largest_cells * dtype.itemsize
    return [part for nbytes in alike.values() for part in messages(nbytes, bucket_bytes)]


@cache_in_world
def _bind(members: Partition, moving: tuple[Moving, ...], dtype: torch.dtype) -> Movement:
    """Bind the broadcast of the blocks of several parameters, one after the other."""
    first = moving[0].broadcast
    P_owner, P_use = first.owners.P, first.used.P
    P_both = P_owner.create_partition_union(P_use)
    ways = [(number, broadcast.name, broadcast.owners) for number, broadcast in moving]
    key = tuple([(number, name, owners.sbp, owners.shape) for number, name, owners in ways])

    def shape_of(rank: int) -> tuple[int, ...]:
        return (sum(prod(owners.box(rank).shape) for _, _, owners in ways),)

    pairing = Pairing(P_owner.shape, P_use.shape)
    plan = plan_between(P_owner, P_use, P_both, pairing, shape_of, ("together", key))
    which = f"{len(moving)} parameters ({moving[0].number} to {moving[-1].number})"
    label = f"broadcast of {which} from {P_owner.size} to {P_use.size} workers"
    return bind(plan, P_both, label, dtype, (0,), dtype)
