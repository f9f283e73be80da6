"""Joint actions of ranks while something goes wrong, and the outcome on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from gpudist import ops, zero_volume_tensor
from gpudist.errors import GpudistError
from gpudist.exchange import start
from gpudist.nn import DistributedInstanceNorm1d
from gpudist.ops.operator import cached_operator
from gpudist.transport.base import Transport
from gpudist.world import runtime
from gpudist.world.partition import CartesianPartition, Partition
from tests.doubles.nccl import clear, fail_device_call, inject, violations
from tests.patience import allowed_s

Action = Callable[[Partition], torch.Tensor]
REPETITIONS = 12


def line(P_world: Partition) -> CartesianPartition:
    return P_world.create_cartesian_topology_partition([1, P_world.size])


def halo_of(P_world: Partition, cells: int = 6, rows: int = 4) -> ops.HaloExchange:
    """Return a halo exchange of columns, which must be packed; made once per world."""
    return cached_operator(
        ops.HaloExchange,
        line(P_world),
        (None, ((1, 2),), True, 0.0, False, (rows, cells * P_world.size), "static"),
    )


def block_of(P_world: Partition, cells: int = 6) -> torch.Tensor:
    whole = torch.arange(4.0 * cells * P_world.size).reshape(4, -1)
    return whole.tensor_split(P_world.size, 1)[P_world.rank or 0].clone()


def halo(P_world: Partition) -> torch.Tensor:
    return halo_of(P_world)(block_of(P_world))


def backward(P_world: Partition) -> torch.Tensor:
    x = block_of(P_world).requires_grad_()
    y = halo_of(P_world)(x)
    (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
    return gradient


def overlapped(P_world: Partition) -> torch.Tensor:
    """Two exchanges on their way at once, on a stream of their own."""
    x, y = block_of(P_world), -block_of(P_world, 5)
    first = start([halo_of(P_world).movement(x)], [x])
    second = start([halo_of(P_world, 5).movement(y)], [y])
    return torch.cat([first.wait(0), second.wait(0)], 1)


def broadcast(P_world: Partition) -> torch.Tensor:
    root = P_world.create_partition_inclusive([P_world.size - 1])
    x = torch.arange(30_000.0) if root.active else zero_volume_tensor()
    return ops.broadcast(x, root, P_world, global_shape=[30_000])


def all_sum_reduce(P_world: Partition) -> torch.Tensor:
    return ops.all_sum_reduce(torch.arange(5.0).reshape(1, 5), line(P_world), [1])


def norm(P_world: Partition) -> torch.Tensor:
    """A normalization by kernels that read whether the world has failed, and its gradient."""
    layer: Any = P_world.wire.remembered.get((norm,))
    if layer is None:
        P_x = P_world.create_cartesian_topology_partition([1, 1, P_world.size])
        layer = P_world.wire.remembered[norm,] = DistributedInstanceNorm1d(P_x, 4)
    x = block_of(P_world).sin()[None].requires_grad_()
    y = layer(x)
    (gradient,) = torch.autograd.grad(y, x, y.detach().square())
    return torch.cat([y.detach(), gradient])


def triples(P_world: Partition) -> torch.Tensor:
    """Sums over all but the last rank, then over all but the first."""
    x = torch.arange(3.0).reshape(1, 3)
    for ranks in (range(P_world.size - 1), range(1, P_world.size)):
        P_x = P_world.create_partition_inclusive(ranks)
        if P_x.active:
            x = ops.all_sum_reduce(x, line(P_x), [1])
    return x


def barrier(P_world: Partition) -> torch.Tensor:
    P_world.barrier()
    return torch.zeros(1)


def allgather_data(P_world: Partition) -> torch.Tensor:
    return torch.tensor(P_world.allgather_data([P_world.rank or 0, 7]))


ACTIONS: dict[str, Action] = {
    action.__name__: action
    for action in (
        halo, backward, overlapped, broadcast, all_sum_reduce, norm, triples, barrier,
        allgather_data,
    )
}  # fmt: skip


@dataclass
class Fate:
    """Outcome on one rank.

    Attributes:
        error: first error that it raised; ``None`` if everything went well.
        after_s: seconds from its start to the error.
        later: error that it raised when it continued.
        closing_s: seconds it took to close the transport.
        misuses: misuses of NCCL and of the device that the doubles saw.
    """

    error: BaseException | None = None
    after_s: float = 0.0
    later: BaseException | None = None
    closing_s: float = 0.0
    misuses: list[str] = field(default_factory=list)


def fate_of(
    transport: Transport, *actions: Callable[[], Any], begun_s: list[float] | None = None
) -> Fate:
    """Do one thing after the other, until one raises, then go on, and close.

    ``begun_s`` gets the time from which on something may go wrong; else that is now.
    """
    fate = Fate()
    begin_s = time.monotonic()
    try:
        for action in actions:
            action()
    except BaseException as error:
        fate.error = error.with_traceback(None)
    fate.after_s = time.monotonic() - (begun_s[0] if begun_s else begin_s)
    if fate.error is not None:
        try:
            actions[-1]()
        except BaseException as error:
            fate.later = error.with_traceback(None)
    begin_s = time.monotonic()
    transport.close()
    fate.closing_s = time.monotonic() - begin_s
    fate.misuses = violations()
    clear()
    return fate


def repeat(P_world: Partition, action: Action, expected: torch.Tensor | None) -> None:
    for _ in range(REPETITIONS):
        result = action(P_world)
        if expected is not None and not torch.equal(result, expected):
            raise AssertionError(f"wrong numbers: {result} is not {expected}")


def with_fault(
    transport: Transport, name: str, what: str, rank: int, after: int, is_bound: bool
) -> Fate:
    """Repeat an action on all ranks; on one of them something happens.

    Args:
        what: a fault of the double of NCCL, or, after ``device:``, the entry of the device's table
            that fails.
        after: so many operations or calls.
        is_bound: the ranks have done it before.
    """
    P_world, action = runtime.world_of(transport), ACTIONS[name]
    begun_s: list[float] = []

    def play() -> None:
        barrier(P_world)
        expected = action(P_world) if is_bound else None
        if transport.rank == rank:
            if what.startswith("device:"):
                fail_device_call(what.removeprefix("device:"), after)
            else:
                inject(what, -1, after)
        begun_s.append(time.monotonic())
        repeat(P_world, action, expected)

    clear()
    return fate_of(transport, play, begun_s=begun_s)


def check_all_failed(fates: list[Fate], deadline_s: float, *kinds: type[GpudistError]) -> list[str]:
    """Every rank raised in time, and raises the same when it goes on; the texts, by rank."""
    for rank, fate in enumerate(fates):
        where = f"rank {rank}: {fate}"
        assert isinstance(fate.error, kinds), where
        assert fate.after_s < deadline_s + 1.0, where
        assert type(fate.later) is type(fate.error), where
        assert str(fate.error) in str(fate.later) or "NCCL" in str(fate.error), where
        assert fate.closing_s < allowed_s(1.5), where
        assert fate.misuses == [], where
    return [str(fate.error) for fate in fates]
