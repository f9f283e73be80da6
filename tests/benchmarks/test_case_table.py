"""Tables of cases fit 80 characters, and no number is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.case_table import case_table
from benchmarks.document import RESULTS, show
from benchmarks.files import rows_of


def test_results_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [
        row for name in ("halo-2", "parameters-4") for row in rows_of(RESULTS / f"{name}.jsonl")
    ]
    show([*rows, replace(rows[0], case="wrong", correct=False)])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(f"{row.us_median:.1f} us (" in printed.replace("\n", " ") for row in rows)
    assert all(f"{row.ratio:.3f}" in printed for row in rows if row.ratio is not None)
    assert printed.endswith("WRONG\n")


def test_a_case_is_named_once() -> None:
    rows = [("first", ("1", "2")), ("first", ("10", "20")), ("second", ("100", "200"))]
    assert case_table(("a", "b"), rows, left=0).splitlines() == [
        "  a    b",
        "first",
        "  1    2",
        " 10   20",
        "second",
        "100  200",
    ]
