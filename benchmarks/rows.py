"""A row: the measurement of gpudist and one peer in one case."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bandwidth import bandwidth
from benchmarks.case import Case

NO_PEER = "none"
MEMORY_COPY, NO_COMMUNICATION = "memory copy", "no communication"
# Peers of scaling: the whole work on one rank, and one rank's part of it.
ONE_RANK, ONE_BLOCK = "1 rank", "1 block alone"
# Peers that do less than gpudist, or do not communicate, and are therefore bounds.
CEILINGS = (MEMORY_COPY, NO_COMMUNICATION, ONE_BLOCK, "local copy", "clone", "local torch")


@dataclass(frozen=True)
class Row:
    """One line of a result file; times in microseconds, ``ratio`` ours over the peer's.

    ``us`` and ``peer_us`` list the iterations in the order of measurement.
    """

    subject: str
    case: str
    ranks: int
    bytes: int
    us_median: float
    us_p10: float
    us_p90: float
    algbw_gbps: float | None
    busbw_gbps: float | None
    peer: str
    peer_us_median: float | None
    ratio: float | None
    correct: bool
    us: Sequence[float] | None
    peer_us: Sequence[float] | None

    @property
    def is_behind(self) -> bool:
        """Whether a peer that is not a bound is faster."""
        return self.ratio is not None and self.ratio > 1 and self.peer not in CEILINGS


def row(
    case: Case,
    suffix: str,
    us: Sequence[float],
    correct: bool,
    peer: str = NO_PEER,
    peer_us: Sequence[float] | None = None,
) -> Row:
    """Return the row of our series, with a peer's series if there is one."""
    deciles = statistics.quantiles(us, n=10)
    median = statistics.median(us)
    peer_median = statistics.median(peer_us) if peer_us is not None else None
    return Row(
        case.subject,
        case.name + suffix,
        case.ranks,
        case.bytes,
        round(median, 3),
        round(deciles[0], 3),
        round(deciles[-1], 3),
        *bandwidth(case.subject, case.name, case.ranks, case.bytes, median),
        peer,
        round(peer_median, 3) if peer_median is not None else None,
        round(median / peer_median, 4) if peer_median is not None else None,
        correct,
        [round(each, 3) for each in us],
        [round(each, 3) for each in peer_us] if peer_us is not None else None,
    )
