"""Write RESULTS.md beside this file from the results: ``python -m benchmarks.correctness.page``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.correctness.__main__ import FILES, HEADING, Row, counts, read, runs, table
from benchmarks.correctness.cases import CASES
from benchmarks.correctness.judge import KINDS
from benchmarks.correctness.libraries import ABSENT, LIBRARIES
from benchmarks.environment import words

PAGE = Path(__file__).with_name("RESULTS.md")
TEMPLATE = Path(__file__).with_name("page.md")
MOST_REASONS = 8
REASON = 110  # characters


def read_all(folder: Path = FILES) -> tuple[dict[str, list[Row]], list[str]]:
    """Return the rows by library, and the environments that they were found in."""
    rows: dict[str, list[Row]] = {}
    environments: list[str] = []
    for peer in LIBRARIES:
        path = folder / f"{peer.file}.jsonl"
        if path.exists():
            environment, rows[peer.name] = read(path)
            environments.append(f"{peer.name}: {words(environment)}")
    return rows, environments


def page(rows: dict[str, list[Row]], environments: Sequence[str]) -> str:
    """Return the page."""
    names = [case.name for case in CASES]
    lines = [[name, *(cell(name, of) for of in rows.values())] for name in names]
    absent = [f"- **{name}**: {reason}.\n" for name, reason in ABSENT.items()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        libraries=_table(HEADING, table(dict(rows))),
        cases=len(CASES),
        runs=len(runs()),
        absent="".join(absent),
        verdicts=_table(("case", *rows), lines),
        reasons=_table(("library", "exception", "times"), _reasons(rows)),
        environments="".join(f"- {each}\n" for each in environments),
    )


def cell(case: str, rows: Sequence[Row]) -> str:
    """Return the verdicts on a case in all layouts."""
    found = [row for row in rows if row.case == case and row.kind != "not offered"]
    parts: list[str] = []
    for kind, number in zip(KINDS, counts(found), strict=True):
        if number:
            where = ", ".join(row.layout for row in found if row.kind == kind)
            text = kind if kind == "right" else f"**{kind}**{_difference(found, kind)}"
            parts.append(text if number == len(found) else f"{text}: {where}")
    return "; ".join(parts)


def _difference(rows: Sequence[Row], kind: str) -> str:
    chosen = [row for row in rows if row.kind == kind]
    if kind == "crash/hang":
        return f" ({chosen[0].detail})"
    if kind != "silently wrong":
        return ""
    errors = [row.error for row in chosen if row.error is not None]
    causes = [f"{max(errors):.2g}"] if errors else []
    causes += ["missing gradient"] * any("missing" in row.detail for row in chosen)
    causes += ["shape"] * any("shape" in row.detail for row in chosen)
    return f" ({', '.join(causes)})"


def _reasons(rows: dict[str, list[Row]]) -> Iterable[Sequence[str]]:
    for name, of in rows.items():
        reasons = Counter(row.detail[:REASON] for row in of if row.kind == "refused")
        for text, times in reasons.most_common(MOST_REASONS):
            yield name, f"`{text.replace('|', '/').replace('`', '')}`", str(times)


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    PAGE.write_text(page(*read_all()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
