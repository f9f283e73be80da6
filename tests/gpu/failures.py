"""Bodies in which a rank dies, raises or disagrees, and the others detect it."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PeerFailure, PlanMismatch
from gpudist.world.partition import Partition
from tests.gpu.streams import recorded
from tests.ops.dense import compare_every_call

# The others are where the test wants them by then.
DEATH_S = 1.0


def _ring(P_world: Partition) -> torch.nn.Module:
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    return nn.HaloExchange(P_x, halo=((1, 1),), periodic=True)


def _seconds_until_failure(P_world: Partition, ring: torch.nn.Module, victim: int) -> float:
    """Measure repeated calls until one of them detects the failure and raises."""
    x = torch.ones(8, device=P_world.device)
    start_s = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        while True:
            ring(x)
            P_world.wire.wait()
    assert caught.value.rank == victim, str(caught.value)
    return time.monotonic() - start_s


def _warm(P_world: Partition) -> torch.nn.Module:
    ring = _ring(P_world)
    ring(torch.ones(8, device=P_world.device))
    P_world.wire.wait()
    return ring


def killed(P_world: Partition, victim: int, deadline_s: float) -> None:
    ring = _warm(P_world)
    if P_world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    seconds = _seconds_until_failure(P_world, ring, victim)
    assert seconds < deadline_s + 1, f"rank {P_world.rank} took {seconds:.1f} s"


def raised(P_world: Partition, victim: int, deadline_s: float) -> None:
    ring = _warm(P_world)
    if P_world.rank == victim:
        raise ZeroDivisionError("a mistake of the user")
    seconds = _seconds_until_failure(P_world, ring, victim)
    assert seconds < deadline_s + 1, f"rank {P_world.rank} took {seconds:.1f} s"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _read_until_failure(
    P_world: Partition, call: Callable[[], torch.Tensor], victim: int, deadline_s: float
) -> None:
    """Read the sum of what ``call`` returns until the victim's death raises.

    All sums read before must be of cells that have arrived.
    """
    start_s = time.monotonic()
    with pytest.raises(PeerFailure) as caught:
        while True:
            total = call().sum().item()
            assert math.isnan(total) or total == TOTAL, total
            P_world.wire.wait()
    seconds = time.monotonic() - start_s
    assert caught.value.rank == victim, str(caught.value)
    assert seconds < deadline_s + DEATH_S + 1, f"rank {P_world.rank} took {seconds:.1f} s"


# Sum of 8 ones and a ghost on each side.
TOTAL = 10.0


def killed_while_read(
    P_world: Partition, victim: int, deadline_s: float, queued: int = 0, warm: bool = True
) -> None:
    """The victim dies while the others read a result that waits for its message.

    Args:
        victim: the rank.
        deadline_s: of the others' waits.
        queued: operators that each of them puts on the stream before that.
        warm: there has been a message to the victim before.
    """
    ring = _warm(P_world) if warm else _ring(P_world)
    x = torch.ones(8, device=P_world.device)
    if P_world.rank == victim:
        time.sleep(DEATH_S)
        _die()

    def call() -> torch.Tensor:
        y = ring(x)
        for _ in range(queued):
            y = ring(x)
        return y

    _read_until_failure(P_world, call, victim, deadline_s)


def killed_beside_a_graph(P_world: Partition, victim: int, deadline_s: float) -> None:
    """The victim dies while the others replay a graph, which they still have afterwards."""
    ring = _warm(P_world)
    x = torch.ones(8, device=P_world.device)
    replay = recorded(lambda: ring(x), P_world.device, rehearsed=True)
    replay()
    P_world.wire.wait()
    if P_world.rank == victim:
        time.sleep(DEATH_S)
        _die()
    _read_until_failure(P_world, replay, victim, deadline_s)
    # An error of the GPU's would be raised here, and not by what came before.
    assert float(torch.ones(8, device=P_world.device).sum()) == 8


# These objects are kept until the process ends.
_kept: list[Any] = []


def keep_a_graph(P_world: Partition) -> None:
    """A graph that has been replayed stays until the process ends."""
    ring = _warm(P_world)
    x = torch.ones(8, device=P_world.device)
    replay = recorded(lambda: ring(x), P_world.device, rehearsed=True)
    assert float(replay().sum()) == TOTAL
    P_world.wire.wait()
    _kept.append(replay)


def disagreed(P_world: Partition) -> str:
    """Rank 0 carries out another operator than the others; all of them learn which."""
    compare_every_call(P_world)
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    x = torch.ones(8, device=P_world.device)
    root = P_world.create_partition_inclusive([0])
    # Both are collectives of all ranks: what is compared has the same course.
    copies, total = nn.Broadcast(root, P_world), nn.AllSumReduce(P_x, (0,))
    copies(x if root.active else x.new_empty(8, 0))
    total(x)
    with pytest.raises(PlanMismatch) as caught:
        if P_world.rank == 0:
            total(x)
        else:
            copies(x.new_empty(8, 0))
        P_world.wire.wait()
    return str(caught.value)
