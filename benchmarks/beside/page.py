"""Write benchmarks/beside/RESULTS.md from the results: ``python -m benchmarks.beside.page``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import behind
from benchmarks.beside.__main__ import FILES, RANKS
from benchmarks.beside.rows import HEADING, BesideRow, cells, read, summary
from benchmarks.beside.work import ALL_REDUCE, GOALS, UNET
from benchmarks.document import RESULTS
from benchmarks.environment import words
from benchmarks.files import rows_of

PAGE = Path(__file__).with_name("RESULTS.md")
TEMPLATE = Path(__file__).with_name("page.md")
REASONS = ("behind because", "cases (ranks)", "ratios", "reason")


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


def page(
    rows: Sequence[BesideRow], environments: Sequence[dict[str, Any]], found: behind.Count
) -> str:
    """Return the page."""
    kinds = [f"{number} {kind}" for kind, number in behind.kinds(found.behind).items()]
    missing = [f"Without a result: {name}.\n" for name in found.missing]
    return TEMPLATE.read_text(encoding="utf-8").format(
        goal_time=GOALS[UNET].time,
        goal_memory=GOALS[UNET].memory,
        goal_equal=GOALS[ALL_REDUCE].time,
        summary=summary(rows) if rows else "They are not measured yet on an idle machine.",
        rows=_table(HEADING, [cells(row) for row in rows if not row.verdict]) if rows else "",
        untimed="".join(_untimed(rows)),
        cases=found.cases,
        goal=behind.GOAL,
        limit=behind.BEHIND,
        behind=behind.summary(found),
        kinds="; ".join(kinds),
        missing="".join(missing),
        reasons=_table(REASONS, _reasons(found.behind)),
        environments="".join(f"- {words(each)}\n" for each in environments),
    )


def _untimed(rows: Sequence[BesideRow]) -> Iterable[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.verdict:
            found.setdefault((row.peer, row.verdict), []).append(f"{row.case} ({row.ranks})")
    for (peer, verdict), cases in found.items():
        yield f"- {peer}: {'; '.join(cases)}: {verdict}\n"


def _reasons(found: Sequence[behind.Behind]) -> Iterable[Sequence[str]]:
    """Yield a line for each reason, those of one kind together."""
    groups: dict[behind.Reason | None, list[behind.Behind]] = {}
    for each in found:
        groups.setdefault(each.reason, []).append(each)
    order = list(behind.kinds(found))
    for reason in sorted(groups, key=lambda one: order.index(behind.kind(one))):
        of = groups[reason]
        ranks: dict[str, list[str]] = {}
        for each in of:
            ranks.setdefault(each.key[2], []).append(str(each.key[1]))
        names = "; ".join(f"{case} ({', '.join(on)})" for case, on in ranks.items())
        ratios = [max(each.ratios.values()) for each in of]
        low, high = min(ratios), max(ratios)
        spread = f"{low:.2f}" if low == high else f"{low:.2f} to {high:.2f}"
        yield behind.kind(reason), f"{of[0].key[0]}: {names}", spread, reason.text if reason else ""


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    found = behind.count(behind.frozen(), rows_of(RESULTS), behind.reasons())
    PAGE.write_text(page(*read_all(), found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
