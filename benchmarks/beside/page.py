"""Write benchmarks/beside/RESULTS.md from the results: ``python -m benchmarks.beside.page``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside.__main__ import FILES, RANKS
from benchmarks.beside.rows import HEADING, BesideRow, cells, read, summary
from benchmarks.beside.work import ALL_REDUCE, GOALS, UNET
from benchmarks.environment import words

PAGE = Path(__file__).with_name("RESULTS.md")
TEMPLATE = Path(__file__).with_name("page.md")


def read_all(folder: Path = FILES) -> tuple[list[BesideRow], list[dict[str, Any]]]:
    """Return the rows for every number of ranks, and the environments that they were found in."""
    rows: list[BesideRow] = []
    environments: list[dict[str, Any]] = []
    for ranks in RANKS:
        path = folder / f"beside-{ranks}.jsonl"
        if path.exists():
            environment, found = read(path)
            environments.append(environment)
            rows += found
    return rows, environments


def page(rows: Sequence[BesideRow], environments: Sequence[dict[str, Any]]) -> str:
    """Return the page."""
    return TEMPLATE.read_text(encoding="utf-8").format(
        goal_time=GOALS[UNET].time,
        goal_memory=GOALS[UNET].memory,
        goal_equal=GOALS[ALL_REDUCE].time,
        summary=summary(rows) if rows else "They are not measured yet on an idle machine.",
        rows=_table(HEADING, [cells(row) for row in rows if not row.verdict]) if rows else "",
        untimed="".join(_untimed(rows)),
        environments="".join(f"- {words(each)}\n" for each in environments),
    )


def _untimed(rows: Sequence[BesideRow]) -> Iterable[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.verdict:
            found.setdefault((row.peer, row.verdict), []).append(f"{row.case} ({row.ranks})")
    for (peer, verdict), cases in found.items():
        yield f"- {peer}: {'; '.join(cases)}: {verdict}\n"


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    PAGE.write_text(page(*read_all()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
