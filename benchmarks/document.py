"""Print rows on the terminal, or write them to the page benchmarks/results/README.md.

``python -m benchmarks.document`` writes the page from the existing result files.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from benchmarks.case_table import case_table
from benchmarks.environment import ROOT, words
from benchmarks.files import Run, read
from benchmarks.rows import NO_PEER, Row

RESULTS = ROOT / "benchmarks" / "results"
_INTRODUCTION = (
    "# Results of the benchmarks",
    "[benchmarks/README.md](../README.md) explains the columns and the peers. "
    "Times are in microseconds: the\nmedian, and (p10 to p90). A peer's cell has its "
    "median, followed by the ratio of gpudist's time to the peer's. The last\ncolumn names "
    "the peers that are faster than gpudist in that case, except bounds, which do less "
    "(`memory copy`,\n`local copy`, `clone`, `local torch`). `python -m "
    "benchmarks.document` writes this page from the files.",
)


def show(rows: Sequence[Row]) -> None:
    """Print gpudist's times of each case, and under them a table of its peers."""
    print(case_table(("peer", "peer us", "ratio", ""), [(_ours(r), _peer(r)) for r in rows]))


def _ours(r: Row) -> str:
    bus = "" if r.busbw_gbps is None else f", bus {r.busbw_gbps:.3g} GB/s"
    times = f"{r.us_median:.1f} us ({r.us_p10:.1f} to {r.us_p90:.1f})"
    return f"{r.subject}, {r.ranks} ranks: {r.case}: {times}{bus}"


def _peer(r: Row) -> tuple[str, ...]:
    peer_us = "" if r.peer_us_median is None else f"{r.peer_us_median:.1f}"
    ratio = "" if r.ratio is None else f"{r.ratio:.3f}"
    mark = "WRONG" if not r.correct else "behind" if r.is_behind else ""
    return r.peer, peer_us, ratio, mark


def document(runs: Sequence[Run]) -> str:
    """Return the rows as Markdown, with a table per subject and number of ranks."""
    sections = [section for run in runs for section in _sections(run)]
    return "\n\n".join([*_INTRODUCTION, _summary(runs), _environments(runs), *sections]) + "\n"


def behind(rows: Sequence[Row]) -> list[str]:
    """Return the peers that are faster in one case, with only the better of two MPIs."""
    found = [row.peer for row in rows if row.is_behind]
    for kind in (" bare", ""):
        if f"mpi{kind} (best)" in found:
            found = [name for name in found if name not in (f"openmpi{kind}", f"mpich{kind}")]
    return found


def _cases(rows: Sequence[Row]) -> list[list[Row]]:
    cases: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row.subject, row.ranks, row.case), []).append(row)
    return list(cases.values())


def _summary(runs: Sequence[Run]) -> str:
    lines: list[str] = []
    every = behind_in = 0
    for run in runs:
        for title, rows in _groups(run):
            cases = _cases(rows)
            count = sum(bool(behind(case)) for case in cases)
            lines.append(f"| {title} | {len(cases)} | {count} |")
            every, behind_in = every + len(cases), behind_in + count
    table = "\n".join(["| subject | cases | behind a peer in |", "|---|---:|---:|", *lines])
    return f"gpudist is behind a peer in {behind_in} of {every} cases:\n\n{table}"


def _environments(runs: Sequence[Run]) -> str:
    measured: dict[str, list[str]] = {}
    for run in runs:
        measured.setdefault(words(run.environment), []).append(run.source)
    lines = [f"- {said}: {', '.join(names)}" for said, names in measured.items()]
    return "Measured in:\n\n" + "\n".join(lines)


def _sections(run: Run) -> list[str]:
    return [f"## {title}\n\n{_table(rows)}" for title, rows in _groups(run)]


def _groups(run: Run) -> list[tuple[str, list[Row]]]:
    found: list[tuple[str, list[Row]]] = []
    for (subject, ranks), rows in groupby(run.rows, key=lambda r: (r.subject, r.ranks)):
        again = "" if run.source == f"{subject}-{ranks}" else f" ({run.source})"
        found.append((f"{subject}, {ranks} ranks{again}", list(rows)))
    return found


def _table(rows: Sequence[Row]) -> str:
    peers = list(dict.fromkeys(r.peer for r in rows if r.peer != NO_PEER))
    has_bus = any(r.busbw_gbps is not None for r in rows)
    heading = ["case", "bytes", "gpudist", *(["bus GB/s"] if has_bus else []), *peers, "behind"]
    lines = ["| " + " | ".join(heading) + " |"]
    lines.append("|---|" + "---:|" * (len(heading) - 2) + "---|")
    for of_case in _cases(rows):
        of = {r.peer: r for r in of_case}
        mine = of_case[0]
        cells = [mine.case, str(mine.bytes), _times(mine)]
        if has_bus:
            cells.append("" if mine.busbw_gbps is None else f"{mine.busbw_gbps:.3g}")
        cells += [_comparison(of[peer]) if peer in of else "" for peer in peers]
        cells.append(", ".join(behind(of_case)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _times(r: Row) -> str:
    return f"{r.us_median:.1f} ({r.us_p10:.1f} to {r.us_p90:.1f})" + ("" if r.correct else " WRONG")


def _comparison(r: Row) -> str:
    return f"{r.peer_us_median:.1f}, **{r.ratio:.2f}**" + ("" if r.correct else " WRONG")


def write_document(folder: Path = RESULTS) -> None:
    (folder / "README.md").write_text(document(read(folder)), encoding="utf-8")


if __name__ == "__main__":
    write_document()
