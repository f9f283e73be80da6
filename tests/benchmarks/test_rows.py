"""Rows from given series, without any ranks."""

from __future__ import annotations

from dataclasses import asdict, fields, replace

import pytest

from benchmarks.bandwidth import bandwidth
from benchmarks.case import MIB, Case
from benchmarks.document import behind, document
from benchmarks.files import Run
from benchmarks.measure import ALL_US, FASTEST_US, MAX_CALLS, Series, calls_for, rows_of
from benchmarks.rows import Row

KEYS = [
    *("subject", "case", "ranks", "bytes", "us_median", "us_p10", "us_p90"),
    *("algbw_gbps", "busbw_gbps", "peer", "peer_us_median", "ratio", "correct", "us", "peer_us"),
]
CASE = Case("halo", "small", 2, 4096, {})


def series(name: str, middle: float, correct: bool = True) -> Series:
    """Times of median ``middle``, whose mean is another; the deciles are 0.9 and 3 of it."""
    return Series(name, [middle * f for f in (1, 3, 0.9) for _ in range(7)], correct)


def documented(rows: list[Row]) -> str:
    return document(
        [Run("halo-2", {"versions": {"torch": "2.13.0"}, "command": "make bench"}, rows)]
    )


def test_a_row_has_exactly_these_keys() -> None:
    (row,) = rows_of(CASE, [series("gpudist", 3), series("gloo", 4)])
    found = asdict(row)
    assert list(found) == KEYS == [field.name for field in fields(Row)]
    assert found == {
        "subject": "halo", "case": "small", "ranks": 2, "bytes": 4096,
        "us_median": 3.0, "us_p10": 2.7, "us_p90": 9.0,
        "algbw_gbps": 1.365, "busbw_gbps": 1.365,
        "peer": "gloo", "peer_us_median": 4.0, "ratio": 0.75, "correct": True,
        "us": [3.0] * 7 + [9.0] * 7 + [2.7] * 7, "peer_us": [4.0] * 7 + [12.0] * 7 + [3.6] * 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("subject", "case", "ranks", "factor"),
    [
        ("broadcast", "4 KiB", 4, 1.0),
        ("sum_reduce", "4 KiB", 4, 1.0),
        ("messages", "4 KiB, bare", 4, 1.0),
        ("all_sum_reduce", "4 KiB", 2, 1.0),
        ("all_sum_reduce", "4 KiB", 4, 1.5),
        ("repartition", "64 KiB global", 4, 0.75),
        ("operators", "all_gather, 4 KiB", 2, 0.5),
        ("operators", "sum_scatter, 4 KiB, new pages", 8, 0.875),
    ],
)
def test_bus_bandwidth_is_that_of_nccl_tests(
    subject: str, case: str, ranks: int, factor: float
) -> None:
    assert bandwidth(subject, case, ranks, 8_000_000, 1000.0) == (8.0, 8.0 * factor)


def test_a_layer_has_no_bandwidth() -> None:
    assert bandwidth("layers", "Conv2d", 2, 4096, 1.0) == (None, None)
    assert bandwidth("halo", "nothing is sent", 2, 0, 1.0) == (None, None)


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
    assert "WRONG" in documented(rows)


def test_without_a_peer_the_ratio_is_null() -> None:
    (row,) = rows_of(CASE, [series("gpudist", 6)])
    found = asdict(row)
    assert (found["peer"], found["peer_us_median"], found["ratio"]) == ("none", None, None)
    assert found["peer_us"] is None and not row.is_behind


def test_where_ours_is_slower_the_row_names_the_peers_that_are_not() -> None:
    faster = ("openmpi", "mpich", "clone", "memory copy", "openmpi bare")
    rows = rows_of(
        CASE, [series("gpudist", 6), series("gloo", 8), *(series(name, 3) for name in faster)]
    )
    assert behind(rows) == ["openmpi bare", "mpi (best)"]
    assert behind([replace(row, ratio=1.0) for row in rows]) == []
    text = documented(rows)
    assert "gpudist is behind a peer in 1 of 1 cases" in text
    assert "| halo, 2 ranks | 1 | 1 |" in text
    assert [line for line in text.splitlines() if line.endswith("| openmpi bare, mpi (best) |")]


def test_the_document_has_a_line_for_each_case_and_a_column_for_each_peer() -> None:
    rows = rows_of(CASE, [series("gpudist", 6), series("gloo", 8), series("clone", 3)])
    text = documented(rows)
    assert "## halo, 2 ranks" in text and "torch 2.13.0; `make bench`: halo-2" in text
    assert "| case | bytes | gpudist | bus GB/s | gloo | clone | behind |" in text
    line = "| small | 4096 | 6.0 (5.4 to 18.0) | 0.683 | 8.0, **0.75** | 3.0, **2.00** |  |"
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
