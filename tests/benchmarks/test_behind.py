"""Frozen cases: which are behind, and which have no result."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.behind import Reason, count, frozen, kinds, main, reasons
from benchmarks.case import Case
from benchmarks.files import write
from benchmarks.rows import MEMORY_COPY, Row, row

WHY = [Reason("s", "a*", "first", "1", ranks=2), Reason("s", "*", "second", "2")]


def measured(name: str, ranks: int, correct: bool = True, **peers: float) -> list[Row]:
    case = Case("s", name, ranks, 8, {})
    return [
        row(case, "", [ratio] * 20, correct, peer.replace("_", " "), [1.0] * 20)
        for peer, ratio in peers.items()
    ]


def test_behind_is_more_than_5_percent_to_a_peer_that_is_not_a_bound() -> None:
    cases = {("s", 2, name): ["mpi", MEMORY_COPY] for name in ("ab", "b", "c", "d")}
    rows = [
        *measured("ab", 2, mpi=1.06, memory_copy=0.5),
        *measured("b", 2, mpi=1.05, memory_copy=9.0),
        *measured("c", 2, correct=False, mpi=1.2, another=7.0),
        *measured("d", 4, mpi=3.0),
    ]
    found = count(cases, rows, WHY)
    assert [(each.key[2], each.ratios) for each in found.behind] == [
        ("ab", {"mpi": 1.06}), ("c", {"mpi": 1.2}),
    ]  # fmt: skip
    assert kinds(found.behind) == {"first": 1, "second": 1}
    assert found.missing == ["s, 2 ranks: c: memory copy", "s, 2 ranks: d"]
    assert found.wrong == ["s, 2 ranks: c"]


def test_a_case_without_a_reason_says_so() -> None:
    (found,) = count({("s", 2, "b"): ["mpi"]}, measured("b", 2, mpi=2.0), WHY[:1]).behind
    assert found.reason is None and kinds([found]) == {"no reason given": 1}


def test_no_frozen_case_was_removed() -> None:
    assert len(frozen()) == 306
    assert all(frozen().values())


def test_the_command_fails_where_a_result_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(measured("b", 2, mpi=2.0), {}, tmp_path / "s-2.jsonl")
    assert main(["--results", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "behind a peer in 0 of 306" in said
    assert "306 cases or peers without a result" in said
    subjects = {key[0] for key in frozen()}
    assert {reason.subject for reason in reasons()} <= subjects
