"""Measure the offsets between the clocks of ranks by messages."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic_ns

import torch

from gpudist.transport.base import Signature
from gpudist.world.partition import Partition

_ASKED = 8


@dataclass(frozen=True)
class Reading:
    """Comparison of this rank's clock with the clock of rank 0.

    Attributes:
        at_ns: time of the comparison, by this rank's monotonic clock.
        offset_ns: rank 0's clock minus this rank's clock.
        error_ns: bound of the offset's error: half of the shortest round trip.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def read_clock(P: Partition) -> Reading:
    """Compare this rank's clock with that of rank 0 of ``P``. Collective, one rank after another.

    Source:
        Cristian 1989, "Probabilistic clock synchronization": the shortest round trip bounds the
        error.
    """
    best = Reading(monotonic_ns(), 0, 0)
    for rank in range(1, P.size):
        if P.rank == 0:
            for _ in range(_ASKED):
                _receive(P, rank)
                _send(P, rank, monotonic_ns())
        elif P.rank == rank:
            best = min((_ask(P) for _ in range(_ASKED)), key=lambda reading: reading.error_ns)
    return best


def align_ns(at_ns: int, first: Reading, last: Reading) -> float:
    """Convert a time of this rank's clock to rank 0's, between two readings and beyond."""
    passed = last.at_ns - first.at_ns
    share = (at_ns - first.at_ns) / passed if passed else 0.0
    return at_ns + first.offset_ns + share * (last.offset_ns - first.offset_ns)


def _ask(P: Partition) -> Reading:
    before = monotonic_ns()
    _send(P, 0, before)
    theirs = _receive(P, 0)
    after = monotonic_ns()
    return Reading(after, theirs - (before + after) // 2, (after - before + 1) // 2)


def _send(P: Partition, peer: int, value: int) -> None:
    with P.wire.group(_signature(P)):
        P.communicator.send(torch.tensor([value]), peer)


def _receive(P: Partition, peer: int) -> int:
    came = torch.empty(1, dtype=torch.int64)
    with P.wire.group(_signature(P)):
        P.communicator.recv(came, peer)
    return int(came)


def _signature(P: Partition) -> Signature:
    return Signature.of(f"compare clocks on {list(P.shape)}", P.digest)
