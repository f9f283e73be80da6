"""Execute several movements together, for one differentiable node or operator.

All messages of their first stages are in flight together, then all messages of their second stages,
and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from gpudist.checks.digest import digest_of
from gpudist.checks.storage import storage_problem, with_memory
from gpudist.errors import ShapeError
from gpudist.exchange.in_flight import Blocks, InFlight
from gpudist.exchange.movement import Movement
from gpudist.exchange.reference_executor import plain, run_steps
from gpudist.exchange.step import MovementStep
from gpudist.transport.base import (
    BoundSteps,
    ReduceOp,
    RunSteps,
    Signature,
    StageCall,
    Transport,
)
from gpudist.transport.flight_recorder import Activity
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
    first, others = movements[0], tuple(movements[1:])
    results: Sequence[torch.Tensor | None] = inputs
    for bound in first.kept.get(others) or _bind(first, others):
        results = bound.run(results)
    return tuple(results)  # pyright: ignore[reportReturnType]


def carry_out_one(movement: Movement, x: torch.Tensor) -> torch.Tensor:
    """Execute one movement; the same as :func:`carry_out`, a little faster."""
    first, *others = movement.kept.get(()) or _bind(movement, ())
    results: list[torch.Tensor | None] = first.run((x,))
    for bound in others:
        results = bound.run(results)
    return results[0]  # pyright: ignore[reportReturnType]


def execution_of(movement: Movement) -> RunSteps:
    """Return :func:`carry_out` of one movement of one stage, which looks nothing up."""
    (bound,) = movement.kept.get(()) or _bind(movement, ())
    return bound.run


def repetition_of(movement: Movement) -> Callable[[torch.Tensor | None], torch.Tensor | None]:
    """Return a function that repeats the last call of :func:`carry_out_one`, or returns ``None``.

    See :class:`~gpudist.transport.base.BoundSteps`.
    """
    bound = movement.kept.get(()) or ()
    return bound[0].run_like_last if len(bound) == 1 else never_repeated


def never_repeated(x: torch.Tensor | None) -> None:
    """Repeat nothing."""


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
    targets: Blocks = list(into) if into is not None else [None] * len(movements)
    adds = tuple([target is not None for target in targets])
    common: _Common = movements[0].kept.get_or_make(
        (adds, *movements[1:]), lambda: _common(tuple(movements), 0, adds)
    )
    wire, signature, activity, steps = common
    blocks = [step.block(x) for step, x in zip(steps, inputs, strict=True)]
    for step, target in zip(steps, targets, strict=True):
        step.check_target(target)
    communicates = any([step.stage.communicates for step in steps])
    if not (communicates and _adds_in_place(targets)):
        results = list(carry_out(movements, blocks))
        for i, (result, target) in enumerate(zip(results, targets, strict=True)):
            if target is not None:
                results[i] = target.add_(result)
        return InFlight([*results], wire)
    if activity is None:
        return InFlight(run_steps(wire, signature, steps, blocks, targets), wire)
    calls: list[StageCall] = []
    outputs: Blocks = []
    numbers: dict[int, int] = {}
    for i, (step, x, target) in enumerate(zip(steps, blocks, targets, strict=True)):
        y, call = step.call(x, target)
        outputs.append(y)
        if call is not None:
            numbers[i] = len(calls)
            calls.append(call)
    stages = wire.start_stages(signature, calls, activity)
    return InFlight(outputs, wire, signature.label, stages, numbers, (blocks, calls))


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
        partition.wire.reject(ShapeError(f"all_reduce({op}): {problem}"), partition.ranks)
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    label = f"all_reduce({op}) of {x.dtype} {list(x.shape)} on {list(partition.shape)}"
    with partition.wire.group(Signature.of(label, partition.digest)):
        partition.communicator.all_reduce(plain(with_memory(x.detach())), output, op)
    return output


class _Common(NamedTuple):
    """Properties that the steps of several movements share.

    Attributes:
        activity: activity that counts their calls, ``None`` if nothing is exchanged or the
            transport only carries messages, which it counts one by one.
    """

    wire: Transport
    signature: Signature
    activity: Activity | None
    steps: tuple[MovementStep, ...]


def _bind(first: Movement, others: tuple[Movement, ...]) -> tuple[BoundSteps, ...]:
    """Return one step of each movement per stage, bound together and cached.

    It is kept by the first movement, and ends with it.
    """
    movements = (first, *others)
    depths = max(len(movement.stages) for movement in movements)
    bound: list[BoundSteps] = []
    for depth in range(depths):
        wire, signature, activity, _ = _common(movements, depth)
        steps = [m.steps[depth] if depth < len(m.stages) else None for m in movements]
        if wire.packs:
            bound.append(wire.bind_steps(signature, activity, steps))
        else:
            bound.append(BoundSteps(partial(run_steps, wire, signature, steps)))
    return first.kept.get_or_make(others, lambda: tuple(bound))


def _common(
    movements: tuple[Movement, ...], depth: int, adds: Sequence[bool] | None = None
) -> _Common:
    # ``adds``: whether the output of each is added to a tensor, if they are started.
    at_first, *others = [movement.stages[0][1] for movement in movements]
    require_one_world(movements[0].label, at_first, *others)
    wire = at_first.wire
    if adds is not None and any(len(movement.stages) > 1 for movement in movements):
        most = max(len(movement.stages) for movement in movements)
        labels = " + ".join(movement.label for movement in movements)
        raise ShapeError(
            f"{labels} has {most} stages, but only movements of one stage can be started; carry it "
            "out instead"
        )
    now = [movement for movement in movements if depth < len(movement.stages)]
    steps = tuple([movement.steps[depth] for movement in now])
    label = " + ".join(movement.label for movement in now)
    digest = digest_of(*(movement.identity for movement in now), b"%d" % depth)
    activity = None
    if wire.packs and any(step.stage.communicates for step in steps):
        pairs = zip(steps, adds or (False,) * len(steps), strict=True)
        posts = [post for step, accumulates in pairs for post in step.posts(accumulates)]
        activity = wire.recorder.new_activity(label, posts)
    return _Common(wire, Signature(label, digest), activity, steps)


def _adds_in_place(into: Blocks) -> bool:
    # Each 16-bit tensor is accumulated in its own float32 copy, so no tensor may occur twice.
    there = [y for y in into if y is not None]
    narrow = [y.data_ptr() for y in there if y.dtype in (torch.float16, torch.bfloat16)]
    return all(y.is_contiguous() for y in there) and len(narrow) == len(set(narrow))
