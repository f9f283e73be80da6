"""The program of every rank of an experiment: the operator, forward and backward, repeatedly."""

from __future__ import annotations

import itertools
import signal
import time
from dataclasses import dataclass

import torch

from gpudist import zero_volume_tensor
from gpudist.transport.failure.channel import Failure
from gpudist.world.partition import Partition
from tests.faults.chaos.experiment import DEADLINE_S, Experiment
from tests.faults.chaos.points import Victim
from tests.faults.chaos.strike import Mistake, Strike
from tests.faults.operators import OPERATORS, SAME, Apply
from tests.faults.ranks import strikes

# After which a rank that has seen no failure ends without one.
PATIENCE_S = DEADLINE_S + 20.0
_MORE_STEPS = 3


class WrongNumbers(Exception):
    """A result that is not the oracle's."""


class NotReached(Exception):
    """The victim did not reach the point."""


@dataclass
class Task:
    """One rank's part of an operator, and its expected result.

    ``x`` and ``y`` are ``None`` if the rank has no input or output.
    """

    apply: Apply
    x: torch.Tensor | None
    y: torch.Tensor | None
    upstream: torch.Tensor | None
    gradient: torch.Tensor | None
    is_linear: bool


def task(P: Partition, name: str, nbytes: int) -> Task:
    """Computed by every rank alone."""
    row, rank = OPERATORS[name], P.rank
    assert rank is not None
    xs = row.blocks(P.size, nbytes)
    for x in xs:
        if x is not None:
            x.requires_grad_()
    ys = row.alone(xs)
    upstream = [None if y is None else _pattern(y) for y in ys]
    loss = torch.stack(
        [
            (y * g).sum()
            for y, g in zip(ys, upstream, strict=True)
            if y is not None and g is not None
        ]
    ).sum()
    inputs = [x for x in xs if x is not None]
    gradients = iter(torch.autograd.grad(loss, inputs))
    each = [None if x is None else next(gradients) for x in xs]
    x, y = xs[rank], ys[rank]
    return Task(
        row.on(P, SAME),
        None if x is None else x.detach(),
        None if y is None else y.detach(),
        upstream[rank],
        each[rank],
        row.is_linear,
    )


def _pattern(y: torch.Tensor) -> torch.Tensor:
    return (torch.arange(y.numel()) % 7 + 1.0).reshape(y.shape)


def carry_out(task: Task, P: Partition, step: int, victim: Victim | None) -> None:
    """Run the operator once, forward and backward, and compare with the oracle.

    Args:
        victim: whether the fault strikes this rank at this step.
    """
    scale = float(step % 3 + 1) if task.is_linear else 1.0
    x = zero_volume_tensor() if task.x is None else task.x * scale
    if victim is not None and task.x is not None:
        x = victim.input(x)
    x = x.detach().requires_grad_()
    y = task.apply(x)
    P.wire.wait()
    _compare("output", task.y, y, scale)
    if victim is not None and victim.tried.point == "backward":
        y.register_hook(lambda _: victim.strike.fire())
    torch.autograd.backward(y, torch.zeros_like(y) if task.upstream is None else task.upstream)
    P.wire.wait()
    _compare("gradient", task.gradient, x.grad, 1.0)


def _compare(
    what: str, expected: torch.Tensor | None, found: torch.Tensor | None, scale: float
) -> None:
    if expected is None:
        return
    if found is None or not torch.allclose(found, expected * scale, rtol=1e-4, atol=1e-4):
        raise WrongNumbers(f"the {what} is {found}, not {expected * scale}")


def join(rank: int, tried: Experiment) -> None:
    """Before a rank joins the world."""
    if rank == tried.victim:
        _victims.append(Victim(tried, Strike(tried.fault, strikes())))
        _victims[0].before_joining()


# That of this process, if it is one.
_victims: list[Victim] = []


def play(P_world: Partition, tried: Experiment) -> int:
    """A rank's part, in a process; how many steps it has done."""
    victim = _victims[0] if _victims else None
    try:
        try:
            return steps(P_world, tried, victim)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    except Exception as error:
        # As for an error that ends the process.
        P_world.wire.abort(Failure.from_exception(error, P_world.wire.rank))
        raise


def steps(P_world: Partition, tried: Experiment, victim: Victim | None) -> int:
    """Repeat until something fails, or for long enough after the fault."""
    if victim is not None:
        victim.after_joining(P_world)
    ends_well = tried.fault == "slow" or tried.point == "shutdown"
    end_s = float("inf")
    P: Partition = P_world
    job = task(P, tried.operator, tried.nbytes)
    # All ranks have computed their oracle; from here on they detect a failure when it is reported.
    P_world.barrier()
    took_s = 0.0
    for step in itertools.count():
        if ends_well and step > tried.step + _MORE_STEPS:
            break
        # One that was stopped goes on long after the others have given up, and is to learn of it.
        was_stopped = victim is not None and tried.fault == "stopped"
        if not (ends_well or was_stopped) and time.monotonic() > end_s:
            break
        is_struck = victim is not None and step == tried.step
        if step == tried.step:
            end_s = time.monotonic() + PATIENCE_S
        if tried.point == "split" and step == tried.step:
            if is_struck:
                assert victim is not None
                victim.strike.armed = True
            # Other members, and so a new communicator.
            P = P_world.create_partition_inclusive(list(reversed(range(P_world.size))))
            P.barrier()
            job = task(P, tried.operator, tried.nbytes)
        begin_s = time.monotonic()
        if victim is not None and is_struck:
            victim.begin_step(1.5 * took_s + 0.002)
        carry_out(job, P, step, victim if is_struck else None)
        took_s = time.monotonic() - begin_s
        if victim is not None and step > tried.step + 1:
            _require_struck(tried, victim)
    if tried.point == "shutdown":
        P_world.barrier()
        P_world.wire.wait()
    if victim is not None:
        victim.before_closing(P_world.wire)
    return step


def _require_struck(tried: Experiment, victim: Victim) -> None:
    is_due = tried.point not in ("shutdown", "init") and not victim.is_timed
    if is_due and victim.strike.armed:
        raise NotReached(tried.point)


__all__ = ["Mistake", "NotReached", "WrongNumbers", "join", "play", "steps"]
