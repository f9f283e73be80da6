"""Targets for two ranks relative to peers, and whether the committed results meet them.

``python -m benchmarks.targets`` prints the table of RESULTS.md from ``benchmarks/results``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.files import rows_of
from benchmarks.rows import Row

RESULTS = Path(__file__).parent / "results"
_BARE, _SAME = "mpi bare (best)", "mpi (best)"


@dataclass(frozen=True)
class Target:
    """Limit: at most ``ratio`` times the peer's time plus ``more_us`` microseconds."""

    what: str
    subject: str
    case: str
    peer: str
    ratio: float
    more_us: float = 0.0

    def limit_us(self, peer_us: float) -> float:
        return self.ratio * peer_us + self.more_us

    def words(self) -> str:
        more = f" + {self.more_us:g} us" if self.more_us else ""
        return f"{self.ratio:g} x{more}"


def targets() -> Iterator[Target]:
    """Yield all targets, in the order of the table."""
    for size in ("4 KiB", "64 KiB", "1 MiB"):
        yield Target(f"messages, {size} each way", "messages", f"{size}, bare", _BARE, 1.0)
    block = "[1,8,256,256] on [1,1,2,1]"
    yield Target("halo, [1,8,256,256] on a 2x1 grid", "halo", block, "local copy", 1.0, 8.0)
    for subject in ("broadcast", "sum_reduce", "all_sum_reduce"):
        for size in ("16 B", "4 KiB", "64 KiB", "1 MiB", "4 MiB"):
            yield Target(f"{subject}, {size}", subject, size, _BARE, 1.0, 5.0)
        yield Target(f"{subject}, 64 MiB", subject, "64 MiB", _SAME, 1.2)
    moved = "64 MiB global, 32 MiB a rank"
    yield Target("repartition [2,1] to [1,2], 64 MiB", "repartition", moved, _SAME, 1.5)
    for shape, channels, ratio in (("[1,8,256,256]", 8, 1.15), ("[1,16,1024,1024]", 16, 1.10)):
        case = f"{channels}->{channels} channels, 3x3, global {shape} on [1,1,2,1]"
        what = f"conv, forward and backward, {shape}"
        yield Target(what, "conv", case, "local torch", ratio)


def table(results: Path = RESULTS) -> str:
    """Return the table in Markdown."""
    lines = [
        "| what | gpudist | peer | ratio | at most | reached |",
        "|---|---:|---:|---:|---|---|",
    ]
    rows = {path.stem: rows_of(path) for path in results.glob("*-2.jsonl")}
    for target in targets():
        row = _find(rows[f"{target.subject}-2"], target)
        us, peer_us = row.us_median, row.peer_us_median
        assert peer_us is not None
        over_us = us - target.limit_us(peer_us)
        reached = "yes" if over_us <= 0 else f"no, over by {_time(over_us)}"
        lines.append(
            f"| {target.what} | {_time(us)} | {target.peer}: {_time(peer_us)} "
            f"| {us / peer_us:.2f} | {target.words()} | {reached} |"
        )
    return "\n".join(lines)


def _find(rows: list[Row], target: Target) -> Row:
    found = [row for row in rows if (row.case, row.peer) == (target.case, target.peer)]
    if len(found) != 1 or not found[0].correct:
        raise ValueError(f"{target.what}: no correct row of {target.case} and {target.peer}")
    return found[0]


def _time(us: float) -> str:
    return f"{us:.1f} us" if us < 1000 else f"{us / 1000:.2f} ms"


if __name__ == "__main__":
    print(table())
