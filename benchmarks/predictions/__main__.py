"""Predict what others have measured, and print predicted, measured and their ratio.

    python -m benchmarks.predictions --json benchmarks/results/predictions/latest.json

Rows with their sources are in ``rows.json``, profiles of the machines in ``profiles``, with the
source of every figure in ``profiles/sources.json``. The profiles were committed before the first
prediction was made, and are not changed after it; ``results/predictions/first.json`` keeps that
first run, whose ratios are printed beside the present ones. Where SimGrid is installed (Debian's
python3-simgrid), planned messages are replayed on a fat tree as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.document import RESULTS
from benchmarks.predictions.contention import (
    DIFFERS,
    RANKS,
    Compared,
    compare,
    python_with_simgrid,
)
from benchmarks.predictions.rows import (
    ROWS,
    UNITS,
    Measured,
    machine,
    profiles_digest,
    read_rows,
)
from benchmarks.predictions.work import WORKS, Terms
from gpudist.cli.tables import print_columns

FIRST = RESULTS / "predictions" / "first.json"
HEADING = ("", "predicted", "measured", "ratio", "first run", "goal", "largest term")
TREE_HEADING = ("", "ranks", "links up", "planned", "SimGrid", "ratio", "")
TREE_PROFILE = "h100"


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


def show(rows: Sequence[Measured], found: Sequence[Outcome], first: Mapping[str, float]) -> None:
    """Print the table; ``first`` has the ratios of the first run."""
    print_columns(HEADING, [cells(*both, first) for both in zip(rows, found, strict=True)])
    goals = [one.is_reached for one in found if one.is_reached is not None]
    print(f"\n{sum(goals)} of {len(goals)} goals reached.")
    noted: dict[str, list[str]] = {}
    for row in rows:
        if not (row.is_traced and row.is_like):
            noted.setdefault(row.source, []).append(row.name)
    for source, names in noted.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        print(f"* {names[0]}{more}: {source}.")


def ratios(run: Mapping[str, Any]) -> dict[str, float]:
    """Return the ratios of a run by row."""
    return {row["name"]: row["ratio"] for row in run["rows"]}


def show_trees(compared: Sequence[Compared]) -> None:
    """Print where the planner's links differ from SimGrid's."""
    print_columns(TREE_HEADING, [tree_cells(one) for one in compared])
    off = sum(one.differs for one in compared)
    print(f"\nThe planner differs by more than {100 * DIFFERS:.0f} % in {off} of {len(compared)}.")


def tree_cells(one: Compared) -> tuple[str, ...]:
    """Return a row under ``TREE_HEADING``."""
    links = "all" if one.taper == 1 else f"1/{one.taper}"
    times = (f"{1e6 * seconds:.1f} us" for seconds in (one.planned_s, one.replayed_s))
    note = "differs" if one.differs else ""
    return (one.name, str(one.ranks), links, *times, f"{one.ratio:.2f}", note)


def cells(row: Measured, one: Outcome, first: Mapping[str, float]) -> tuple[str, ...]:
    """Return a row under ``HEADING``."""
    goal = "" if row.within is None else f"{100 * row.within:.0f} %"
    if one.is_reached is not None:
        goal += " reached" if one.is_reached else " missed"
    mark = "" if row.is_traced and row.is_like else " *"
    measured = f"{row.measured:.4g}"
    if row.low != row.high:
        measured = f"{row.low:.4g}-{row.high:.4g} ({measured})"
    predicted = f"{one.predicted:.4g} {row.unit}"
    before = f"{first[row.name]:.2f}" if row.name in first else ""
    ratio = f"{one.ratio:.2f}"
    return (row.name + mark, predicted, measured, ratio, before, goal, one.largest_term)


def facts(
    rows: Sequence[Measured], found: Sequence[Outcome], compared: Sequence[Compared]
) -> dict[str, Any]:
    """Values of a run for JSON, with the commit that they are of; its subject outlives a rebase."""
    return {
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "subject": _git("log", "-1", "--format=%s"),
        "is_clean": not _git("status", "--porcelain", "--", "gpudist", "benchmarks/predictions"),
        "profiles": profiles_digest(),
        "torch": torch.__version__,
        "rows": [
            {**asdict(one), "unit": row.unit, "measured": row.measured}
            for row, one in zip(rows, found, strict=True)
        ],
        "trees": [asdict(one) for one in compared],
    }


def _git(*words: str) -> str:
    folder = str(ROWS.parents[2])
    return subprocess.run(
        ["git", "-C", folder, *words], capture_output=True, text=True, check=False
    ).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file of the measured rows")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument(
        "--trees", type=int, nargs="*", choices=RANKS, default=RANKS,
        help="numbers of ranks to replay on a fat tree; none to leave it out",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    found = outcomes(rows)
    first = json.loads(FIRST.read_text(encoding="utf-8"))
    show(rows, found, ratios(first))
    if first["profiles"] != profiles_digest():
        print("The profiles are not those of the first run.")
    compared: list[Compared] = []
    python = python_with_simgrid() if options.trees else None
    if python is not None:
        print()
        for ranks in options.trees:
            compared += compare(python, machine(TREE_PROFILE), ranks)
        show_trees(compared)
    elif options.trees:
        print("\nNot replayed on a fat tree: no Python here imports simgrid (python3-simgrid).")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(facts(rows, found, compared), indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
