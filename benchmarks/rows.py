"""Rows: the result of a comparison, as JSON, on the terminal, and as a document."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.case import Case

NO_PEER = "none"
FILE_WIDTH = 200


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
    peer_us_median: float | None
    ratio: float | None
    correct: bool


def row(
    case: Case,
    suffix: str,
    us: Sequence[float],
    correct: bool,
    peer: str = NO_PEER,
    peer_us: Sequence[float] | None = None,
) -> Row:
    """The row of our series, and of a peer's if there is one."""
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
        peer,
        round(peer_median, 3) if peer_median is not None else None,
        round(median / peer_median, 4) if peer_median is not None else None,
        correct,
    )


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows as a JSON list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    # Whoever only makes rows, a machine with a GPU above all, need not have rich.
    from rich.console import Console
    from rich.table import Table

    table = Table("subject", "ranks", "case", "peer", "correct")
    for name in ("median us", "p10", "p90", "peer us", "ratio"):
        table.add_column(name, justify="right")
    for r in rows:
        mark = "yes" if r.correct else "[bold red]WRONG"
        numbers = [f"{n:.1f}" for n in (r.us_median, r.us_p10, r.us_p90)]
        peer_us = "" if r.peer_us_median is None else f"{r.peer_us_median:.1f}"
        ratio = "" if r.ratio is None else f"{r.ratio:.3f}"
        table.add_row(r.subject, str(r.ranks), r.case, r.peer, mark, *numbers, peer_us, ratio)
    # A file has no width: give the table all that it needs.
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def document(rows: Sequence[Row], command: str, versions: Mapping[str, str]) -> str:
    """The rows in markdown: a table for each subject and number of ranks, a line for each case."""
    parts = [
        "# Results of the benchmarks",
        "What the columns and the peers are is in [docs/benchmarks.md](../../docs/benchmarks.md). "
        "Times are microseconds: the median, and\n(p10 to p90). A peer's cell is its median and, "
        "behind it, the ratio: ours over the peer's.",
        f"- machine: {machine()}\n- command: `{command}`\n- versions: "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    for (subject, ranks), group in groupby(rows, key=lambda r: (r.subject, r.ranks)):
        parts.append(f"## {subject}, {ranks} ranks\n\n{_table(list(group))}")
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    peers = list(dict.fromkeys(r.peer for r in rows if r.peer != NO_PEER))
    lines = ["| " + " | ".join(["case", "bytes", "gpudist", *peers]) + " |"]
    lines.append("|---|" + "---:|" * (2 + len(peers)))
    for case, group in groupby(rows, key=lambda r: r.case):
        of = {r.peer: r for r in group}
        mine = next(iter(of.values()))
        cells = [case, str(mine.bytes), _times(mine)]
        cells += [_comparison(of[peer]) if peer in of else "" for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _times(r: Row) -> str:
    return f"{r.us_median:.1f} ({r.us_p10:.1f} to {r.us_p90:.1f})"


def _comparison(r: Row) -> str:
    return f"{r.peer_us_median:.1f}, **{r.ratio:.2f}**" + ("" if r.correct else " WRONG")


def machine() -> str:
    """The processor and the number of its cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'unknown processor'}, {os.cpu_count()} cores"
