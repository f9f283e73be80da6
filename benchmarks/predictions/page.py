"""Write RESULTS.md beside this file from the results: ``python -m benchmarks.predictions.page``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.document import RESULTS
from benchmarks.predictions.__main__ import (
    HEADING,
    TREE_HEADING,
    Outcome,
    cells,
    ratios,
    tree_cells,
)
from benchmarks.predictions.contention import DIFFERS, Compared
from benchmarks.predictions.rows import SOURCES, Measured, read_rows

PAGE = Path(__file__).with_name("RESULTS.md")
LATEST, FIRST = (RESULTS / "predictions" / f"{name}.json" for name in ("latest", "first"))
TEMPLATE = Path(__file__).with_name("page.md")


def page(
    rows: Sequence[Measured], latest: dict[str, Any], first: dict[str, Any], sources: dict[str, Any]
) -> str:
    """Return the page."""
    before = ratios(first)
    names = ("name", "predicted", "ratio", "is_reached", "terms_s")
    found = [Outcome(*(row[name] for name in names)) for row in latest["rows"]]
    lines = [cells(row, one, before) for row, one in zip(rows, found, strict=True)]
    goals = [one.is_reached for one in found if one.is_reached is not None]
    trees = [Compared(**fields) for fields in latest["trees"]]
    figures = [(name, *figure) for name, of in sources.items() for figure in of.items()]
    return TEMPLATE.read_text(encoding="utf-8").format(
        rows=_table(HEADING, lines),
        reached=sum(goals),
        goals=len(goals),
        trees=_table(TREE_HEADING, map(tree_cells, trees)),
        differs=round(100 * DIFFERS),
        off=sum(one.differs for one in trees),
        compared=len(trees),
        measurements=_table(("row", "source"), [(row.name, row.source) for row in rows]),
        profiles=_table(("profile", "figure", "source"), figures),
    )


def _table(heading: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [heading, ["---"] * len(heading), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    latest, first, sources = (_read(path) for path in (LATEST, FIRST, SOURCES))
    PAGE.write_text(page(read_rows(), latest, first, sources), encoding="utf-8")
    return 0


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
