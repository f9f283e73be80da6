"""Bodies in which a rank dies, raises or disagrees, and the others learn of it."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from gpudist import nn
from gpudist.errors import PeerFailure, PlanMismatch
from gpudist.partition import Partition
from tests.ops.dense import compare_every_call


def _ring(P_world: Partition) -> torch.nn.Module:
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    return nn.HaloExchange(P_x, halo=((1, 1),), periodic=True)


def _seconds_until_failure(P_world: Partition, ring: torch.nn.Module, victim: int) -> float:
    """Of calls one after another: the first that learns of it raises."""
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
