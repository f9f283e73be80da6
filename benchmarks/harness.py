"""What every benchmark shares: ranks, timing, rows.

A time is the maximum over ranks of one iteration that begins together, divided by its number of
calls, which
is large for short ones: ranks leave a barrier tens of microseconds apart. A row has the median and
the tenth and ninetieth percentile of at least 20 iterations after warm-up, and whether the result
was right. Ours and the peer's iterations alternate, so that both see the same machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from gpudist.exchange import all_reduce
from gpudist.partition import Partition

ITERATIONS = 50
WARM_UP = 5


@dataclass(frozen=True)
class Row:
    """One line of a result file; times in microseconds, ``ratio`` ours over the peer's."""

    subject: str
    case: str
    ranks: int
    bytes: int
    us_median: float
    us_p10: float
    us_p90: float
    peer: str
    peer_us_median: float
    ratio: float
    correct: bool


def start_gloo(P_world: Partition) -> None:
    """Make torch.distributed's default group over gloo among the ranks of ``P_world``."""
    if dist.is_initialized():
        return
    rank, size = P_world.rank, P_world.size
    assert rank is not None
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (port,) = P_world.broadcast_data([store.port] if store is not None else None)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def alternate(
    P_world: Partition,
    operations: Sequence[Callable[[], object]],
    calls: int = 1,
    iterations: int = ITERATIONS,
) -> list[list[float]]:
    """Times of each operation in microseconds, by turns; the maximum over ranks of each."""
    times_us = torch.zeros(len(operations), iterations, dtype=torch.float64)
    for i in range(-WARM_UP, iterations):
        for k, operation in enumerate(operations):
            P_world.barrier()
            start_s = time.perf_counter()
            for _ in range(calls):
                operation()
            if i >= 0:
                times_us[k, i] = (time.perf_counter() - start_s) * 1e6 / calls
    return all_reduce(times_us, P_world, "max").tolist()


def row(
    subject: str,
    case: str,
    ranks: int,
    nbytes: int,
    ours_us: Sequence[float],
    peer: str,
    peer_us: Sequence[float],
    correct: bool,
) -> Row:
    """The row of two measured series."""
    deciles = statistics.quantiles(ours_us, n=10)
    median, peer_median = statistics.median(ours_us), statistics.median(peer_us)
    return Row(
        subject,
        case,
        ranks,
        nbytes,
        round(median, 2),
        round(deciles[0], 2),
        round(deciles[-1], 2),
        peer,
        round(peer_median, 2),
        round(median / peer_median, 3),
        correct,
    )


def write(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table("subject", "case", "ranks", "median us", "p10", "p90", "peer", "peer us", "ratio")
    for r in rows:
        numbers = [f"{n:.1f}" for n in (r.us_median, r.us_p10, r.us_p90)]
        mark = "" if r.correct else " WRONG"
        table.add_row(
            r.subject, r.case, str(r.ranks), *numbers, r.peer, f"{r.peer_us_median:.1f}",
            f"{r.ratio:.3f}{mark}",
        )  # fmt: skip
    Console().print(table)
