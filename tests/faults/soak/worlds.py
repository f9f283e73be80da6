"""Worlds made and closed, thousands of them in one process, whose threads are the ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from gpudist.testing import run_distributed
from gpudist.transport.base import Transport
from gpudist.world import runtime
from tests.faults.soak.samples import Sample, take

RANKS = 2
WAIT_S = 60.0
SAMPLES = 40


def run(transport: str, count: int, samples: int = SAMPLES) -> list[Sample]:
    """Make and close ``count`` worlds, each used once, and sample this process on the way.

    Raises:
        AssertionError: a world gave a wrong result, or a rank did not end.
    """
    taken = [take(None, 0)]
    for number in range(count):
        if transport == "loopback":
            found = run_distributed(lambda P: _use(P.wire), RANKS, timeout=WAIT_S)
        else:
            found = _on_threads(transport)
        assert found == [list(range(RANKS))] * RANKS, found
        if (number + 1) * samples // count > number * samples // count:
            taken.append(take(None, number + 1))
    return taken


def _on_threads(transport: str) -> list[Any]:
    store = dist.HashStore()
    found: list[Any] = [None] * RANKS

    def play(rank: int) -> None:
        try:
            wire = runtime.connect(transport, store, rank, RANKS, WAIT_S, "soak")
            found[rank] = _use(wire)
            wire.close()
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return found


def _use(wire: Transport) -> list[int]:
    P_world = runtime.world_of(wire)
    P_back = P_world.create_partition_inclusive(range(P_world.size)[::-1])
    return [rank for (rank,) in P_back.allgather_data([wire.rank])][::-1]
