"""Rows from given series, without any ranks."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from benchmarks.case import MIB, Case
from benchmarks.measure import ALL_US, FASTEST_US, MAX_CALLS, Series, calls_for, rows_of
from benchmarks.rows import Row, document, write

KEYS = [
    *("subject", "case", "ranks", "bytes", "us_median", "us_p10", "us_p90"),
    *("peer", "peer_us_median", "ratio", "correct"),
]
CASE = Case("halo", "small", 2, 4096, {})


def series(name: str, middle: float, correct: bool = True) -> Series:
    """Times of median ``middle``, whose mean is another; the deciles are 0.9 and 3 of it."""
    return Series(name, [middle * f for f in (1, 3, 0.9) for _ in range(7)], correct)


def test_a_row_has_exactly_these_keys(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.json"
    write(rows_of(CASE, [series("gpudist", 3), series("gloo", 4)]), path)
    (found,) = json.loads(path.read_text())
    assert list(found) == KEYS == [field.name for field in fields(Row)]
    assert found == {
        "subject": "halo", "case": "small", "ranks": 2, "bytes": 4096,
        "us_median": 3.0, "us_p10": 2.7, "us_p90": 9.0,
        "peer": "gloo", "peer_us_median": 4.0, "ratio": 0.75, "correct": True,
    }  # fmt: skip


def test_the_better_mpi_of_each_kind_has_a_row_of_its_own() -> None:
    measured = [
        series("gpudist", 6), series("gloo", 100),
        series("openmpi bare", 2), series("openmpi", 12),
        series("mpich bare", 3), series("mpich", 8, correct=False),
    ]  # fmt: skip
    found = {row.peer: row for row in rows_of(CASE, measured, ", new pages")}
    assert {row.case for row in found.values()} == {"small, new pages"}
    assert {peer: row.ratio for peer, row in found.items()} == {
        "gloo": 0.06, "openmpi bare": 3.0, "openmpi": 0.5, "mpich bare": 2.0, "mpich": 0.75,
        "mpi bare (best)": 3.0, "mpi (best)": 0.75,
    }  # fmt: skip
    assert [peer for peer, row in found.items() if not row.correct] == ["mpich", "mpi (best)"]


def test_one_mpi_alone_is_not_called_the_best() -> None:
    rows = rows_of(CASE, [series("gpudist", 6), series("openmpi", 2)])
    assert [row.peer for row in rows] == ["openmpi"]


def test_our_wrong_result_spoils_every_row() -> None:
    rows = rows_of(CASE, [series("gpudist", 6, correct=False), series("a", 2), series("b", 2)])
    assert [row.correct for row in rows] == [False, False]
    assert "WRONG" in document(rows, "make bench", {})


def test_without_a_peer_the_ratio_is_null() -> None:
    (row,) = rows_of(CASE, [series("gpudist", 6)])
    found = asdict(row)
    assert (found["peer"], found["peer_us_median"], found["ratio"]) == ("none", None, None)


def test_the_document_has_a_line_for_each_case_and_a_column_for_each_peer() -> None:
    rows = rows_of(CASE, [series("gpudist", 6), series("gloo", 8), series("clone", 3)])
    text = document(rows, "python -m benchmarks --all", {"torch": "2.13.0"})
    assert "## halo, 2 ranks" in text and "torch 2.13.0" in text
    assert "| case | bytes | gpudist | gloo | clone |" in text
    line = "| small | 4096 | 6.0 (5.4 to 18.0) | 8.0, **0.75** | 3.0, **2.00** |"
    assert line in text.splitlines()


@pytest.mark.parametrize(
    ("us", "calls"),
    [
        ([ALL_US / 20, ALL_US / 20], 10),
        ([FASTEST_US / 30, ALL_US], 30),
        ([ALL_US, ALL_US], 1),
        ([0.1, 0.1], MAX_CALLS),
    ],
)
def test_short_calls_are_repeated(us: list[float], calls: int) -> None:
    assert calls_for(us) == calls


def test_from_one_mebibyte_on_an_output_is_large() -> None:
    assert Case("halo", "", 2, 0, {}, MIB).has_large_output
    assert not Case("halo", "", 2, 0, {}, MIB - 1).has_large_output
