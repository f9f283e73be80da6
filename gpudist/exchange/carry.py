"""Execute several movements together, for one differentiable node or operator.

All messages of their first stages are in flight together, then all messages of their second stages,
and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from gpudist.checks.digest import digest_of
from gpudist.checks.storage import storage_problem, with_memory
from gpudist.errors import ShapeError
from gpudist.exchange.movement import Movement
from gpudist.exchange.reference_executor import plain
from gpudist.exchange.rounds import Blocks, InFlight, Round
from gpudist.transport.base import ReduceOp, Signature
from gpudist.world.partition import Partition, require_one_world


def carry_out(
    movements: Sequence[Movement], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Execute each movement on its input, all in flight together, and return new tensors.

    Collective over the partitions of the movements. Inputs are never modified.

    Raises:
        ShapeError: an input does not have the shape or dtype its movement was bound to.
        PlanMismatch: ranks execute different movements.
    """
    rounds = _rounds_of(movements)
    results = rounds[0].run(inputs)
    for later in rounds[1:]:
        for part, y in zip(later.parts, later.run(results), strict=True):
            results[part.index] = y
    return tuple(results)  # pyright: ignore[reportReturnType]


def start(
    movements: Sequence[Movement],
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None] | None = None,
) -> InFlight:
    """Start movements of one stage each and return without waiting for them.

    Collective over the partitions of the movements: all ranks must start the same movements in the
    same order, and wait for each of them. Inputs must not change before that. Over a transport that
    does not pack, everything is complete on return.

    Args:
        movements, inputs: see :func:`carry_out`.
        into: per movement, a tensor to which its output is added, or ``None`` for a new tensor.
            Several movements may add to the same tensor; they do so in order.

    Raises:
        ShapeError: see :func:`carry_out`; also if a movement has several stages, or its output does
            not fit the tensor to which it is added.
        PlanMismatch: ranks execute different movements; :meth:`InFlight.wait` may raise it too.
    """
    only, *later = _rounds_of(movements)
    if later:
        labels = " + ".join(movement.label for movement in movements)
        raise ShapeError(
            f"{labels} has {1 + len(later)} stages, but only movements of one stage can be "
            "started; carry it out instead"
        )
    blocks: Blocks = [part.block(x) for part, x in zip(only.parts, inputs, strict=True)]
    targets: Blocks = list(into) if into is not None else [None] * len(blocks)
    for part, target in zip(only.parts, targets, strict=True):
        part.check_target(target)
    return only.start(blocks, targets)


def add_into(
    movements: Sequence[Movement],
    inputs: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """Execute movements of one stage each and add their outputs to existing tensors.

    Like :func:`start`, but waits for all of them. Cells that receive nothing are unchanged.
    """
    in_flight = start(movements, inputs, into)
    return tuple([in_flight.wait(i) for i in range(len(inputs))])


def all_reduce(x: torch.Tensor, partition: Partition, op: ReduceOp = "sum") -> torch.Tensor:
    """Return the element-wise reduction of the members' equally shaped tensors.

    Not differentiable.

    Raises:
        ShapeError: the tensor has no strided memory.
    """
    problem = storage_problem(x)
    if problem:
        partition.wire.refuse(ShapeError(f"all_reduce({op}): {problem}"))
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    label = f"all_reduce({op}) of {x.dtype} {list(x.shape)} on {list(partition.shape)}"
    with partition.wire.group(Signature.of(label, partition.digest)):
        partition.communicator.all_reduce(plain(with_memory(x.detach())), output, op)
    return output


def _rounds_of(movements: Sequence[Movement]) -> tuple[Round, ...]:
    remembered = _passing_rounds if movements[0].is_passing else _rounds
    return remembered(tuple(movements))


def _make_rounds(movements: tuple[Movement, ...]) -> tuple[Round, ...]:
    first, *others = [movement.steps[0].partition for movement in movements]
    require_one_world(movements[0].label, first, *others)
    wire = first.wire
    depths = max(len(movement.steps) for movement in movements)
    return tuple(
        Round(wire, movements, depth, _signature(movements, depth)) for depth in range(depths)
    )


# Rounds hold stages bound by the transport. Those of dynamic shapes are evicted sooner.
_rounds = lru_cache(maxsize=4096)(_make_rounds)
_passing_rounds = lru_cache(maxsize=256)(_make_rounds)


def _signature(movements: tuple[Movement, ...], depth: int) -> Signature:
    now = [movement for movement in movements if depth < len(movement.steps)]
    label = " + ".join(movement.label for movement in now)
    return Signature(label, digest_of(*(movement.identity for movement in now), b"%d" % depth))
