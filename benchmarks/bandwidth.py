"""Algorithm and bus bandwidth, as nccl-tests defines them and benchmarks/README.md repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

# Bus bandwidth divided by algorithm bandwidth, by number of ranks, for operators that define it.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(("messages", "halo", "broadcast", "sum_reduce"), lambda ranks: 1.0),
    "all_sum_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    **dict.fromkeys(
        ("repartition", "scatter", "gather", "all_gather", "sum_scatter"),
        lambda ranks: (ranks - 1) / ranks,
    ),
}


class Bandwidth(NamedTuple):
    """Bandwidths in 10^9 bytes a second; ``None`` if a case's bytes are not the bytes moved."""

    algorithm_gbps: float | None
    bus_gbps: float | None


def operator_of(subject: str, case: str) -> str:
    """Return the operator that a case measures: the subject, or the first word of the case."""
    return case.partition(",")[0] if subject == "operators" else subject


def bandwidth(subject: str, case: str, ranks: int, nbytes: int, us: float) -> Bandwidth:
    """Return the bandwidths of one call that moves ``nbytes`` in ``us`` microseconds."""
    factor = BUS_FACTORS.get(operator_of(subject, case))
    if factor is None or nbytes == 0:
        return Bandwidth(None, None)
    gbps = nbytes / us / 1e3
    return Bandwidth(_rounded(gbps), _rounded(gbps * factor(ranks)))


def _rounded(gbps: float) -> float:
    return float(f"{gbps:.4g}")
