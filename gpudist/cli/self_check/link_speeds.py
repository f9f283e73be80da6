"""Measure the speed and correctness of messages between pairs of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gpudist.transport.base import Signature
from gpudist.world.partition import Partition

# Up to this number of ranks, every pair is measured; above it, every rank with the next.
MOST_IN_PAIRS = 8
REPEATS = 5


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of messages between two ranks, in both directions at once, while others are idle.

    Attributes:
        first, second: ranks of the pair.
        right: whether every byte arrived as it was sent.
        gbps: bytes in one direction over the time of the fastest exchange, in GB/s.
    """

    first: int
    second: int
    right: bool
    gbps: float


def pairs(ranks: int) -> Iterator[tuple[int, int]]:
    """Return the pairs of ranks whose link is measured."""
    if ranks <= MOST_IN_PAIRS:
        yield from ((a, b) for a in range(ranks) for b in range(a + 1, ranks))
    else:
        yield from ((rank, rank + 1) for rank in range(ranks - 1))
        yield 0, ranks - 1


def link_speeds(P_world: Partition, nbytes: int) -> tuple[LinkSpeed, ...]:
    """Measure each link with messages of ``nbytes``; the same on every rank. Collective."""
    speeds: list[LinkSpeed] = []
    for pair in pairs(P_world.size):
        mine = [0, 0]
        if P_world.rank in pair:
            mine = _exchange(P_world, pair, nbytes)
        P_world.barrier()
        wrong, nanoseconds = P_world.allreduce_data(mine, "max")
        speeds.append(LinkSpeed(*pair, right=wrong == 0, gbps=nbytes / max(1, nanoseconds)))
    return tuple(speeds)


def _exchange(P_world: Partition, pair: tuple[int, int], nbytes: int) -> list[int]:
    """Return the number of wrong bytes, and the nanoseconds of the fastest exchange."""
    rank = P_world.rank or 0
    peer = pair[1] if rank == pair[0] else pair[0]
    sent = _bytes(nbytes, rank, P_world.device)
    received = torch.zeros_like(sent)
    signature = Signature.of(f"messages of {nbytes} bytes between ranks {pair[0]} and {pair[1]}")
    times: list[int] = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter_ns()
        with P_world.wire.group(signature):
            P_world.communicator.send(sent, peer)
            P_world.communicator.recv(received, peer)
        P_world.wire.wait()
        times.append(time.perf_counter_ns() - start)
    wrong = int((received != _bytes(nbytes, peer, P_world.device)).sum())
    return [wrong, min(times[1:])]


def _bytes(count: int, rank: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, dtype=torch.int64, device=device)
    return (places * 31 + rank * 17).remainder_(251).to(torch.uint8)
