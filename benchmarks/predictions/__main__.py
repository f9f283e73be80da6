"""Predict what others have measured, and print predicted, measured and their ratio.

    python -m benchmarks.predictions --json benchmarks/results/predictions/first.json

Rows with their sources are in ``rows.json``, profiles of the machines in ``profiles``, with the
source of every figure in ``profiles/sources.json``. The profiles were committed before the first
prediction was made, and are not changed after it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.predictions.rows import ROWS, UNITS, Measured, machine, read_rows
from benchmarks.predictions.work import WORKS, Terms
from gpudist.cli.tables import print_columns

HEADING = ("", "predicted", "measured", "ratio", "goal", "largest term")


@dataclass(frozen=True)
class Outcome:
    """A prediction beside its measurement.

    Attributes:
        name: name of the row.
        predicted: predicted value, in the row's unit.
        ratio: predicted over measured.
        is_reached: whether the error is within the row's goal; ``None`` without a goal.
        terms_s: seconds of the terms of the prediction.
    """

    name: str
    predicted: float
    ratio: float
    is_reached: bool | None
    terms_s: Terms

    @property
    def largest_term(self) -> str:
        """Term that takes most of the predicted time, with its part."""
        positive = {term: s for term, s in self.terms_s.items() if s > 0}
        if len(positive) < 2:
            return ""
        term = max(positive, key=positive.__getitem__)
        return f"{term}, {100 * positive[term] / sum(positive.values()):.0f} %"


def outcomes(rows: Sequence[Measured]) -> list[Outcome]:
    """Predict every row; a ratio needs both of its rows."""
    found: dict[str, Outcome] = {}
    for row in rows:
        if row.kind == "ratio":
            first, second = (found[name].predicted for name in row.of)
            value, terms = first / second, {}
        else:
            value, terms = WORKS[row.kind](machine(row.profile), **row.work)
        predicted = value / UNITS[row.unit]
        ratio = predicted / row.measured
        reached = None if row.within is None else abs(ratio - 1) <= row.within
        found[row.name] = Outcome(row.name, predicted, ratio, reached, terms)
    return list(found.values())


def show(rows: Sequence[Measured], found: Sequence[Outcome]) -> None:
    """Print the table."""
    print_columns(HEADING, [_cells(row, one) for row, one in zip(rows, found, strict=True)])
    goals = [one.is_reached for one in found if one.is_reached is not None]
    print(f"\n{sum(goals)} of {len(goals)} goals reached.")
    notes = [f"* {row.name}: {row.source}." for row in rows if not (row.is_traced and row.is_like)]
    print("\n".join(notes))


def _cells(row: Measured, one: Outcome) -> tuple[str, ...]:
    goal = "" if row.within is None else f"{100 * row.within:.0f} %"
    if one.is_reached is not None:
        goal += " reached" if one.is_reached else " missed"
    mark = "" if row.is_traced and row.is_like else " *"
    measured = f"{row.measured:.4g}"
    if row.low != row.high:
        measured = f"{row.low:.4g}-{row.high:.4g} ({measured})"
    predicted = f"{one.predicted:.4g} {row.unit}"
    return (row.name + mark, predicted, measured, f"{one.ratio:.2f}", goal, one.largest_term)


def facts(rows: Sequence[Measured], found: Sequence[Outcome]) -> dict[str, Any]:
    """Values of a run for JSON, with the commit that they are of."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "is_clean": not _git("status", "--porcelain", "--", "gpudist", "benchmarks/predictions"),
        "torch": torch.__version__,
        "rows": [
            {**asdict(one), "unit": row.unit, "measured": row.measured}
            for row, one in zip(rows, found, strict=True)
        ],
    }


def _git(*words: str) -> str:
    folder = str(ROWS.parent)
    return subprocess.run(
        ["git", "-C", folder, *words], capture_output=True, text=True, check=False
    ).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the measured rows")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    found = outcomes(rows)
    show(rows, found)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(facts(rows, found), indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
