"""Statements of the pages on GPUs agree with the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.gpu.page import H200, PREDICTED, predicted_ms, rows_of, tables

ROOT = Path(__file__).resolve().parents[2]
DENIAL = re.compile(
    r"nothing (here )?has (run|been measured) on (a GPU|one)"
    r"|(not|never) (yet )?(run|been measured) on (a GPU|one)",
    re.IGNORECASE,
)


def test_the_tables_are_those_of_the_rows() -> None:
    page = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    assert tables() in page
    assert all(row["correct"] for row in rows_of(H200, "bench-packing"))


def test_predictions_are_the_planners() -> None:
    """The least of them is what the planner of today says."""
    row = next(rows_of(H200, PREDICTED))
    assert predicted_ms(H200, row["side"]) == pytest.approx(row["predicted_ms"], rel=1e-3)


def test_no_page_says_that_nothing_ran_on_a_gpu() -> None:
    assert DENIAL.search("Nothing has been measured on a GPU yet")
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]
    pages += [ROOT / "docs/llms.txt", *ROOT.glob("benchmarks/gpu/*.py")]
    found = [p.name for p in pages if DENIAL.search(" ".join(p.read_text("utf-8").split()))]
    assert len(pages) > 40 and found == []
