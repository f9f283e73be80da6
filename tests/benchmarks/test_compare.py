"""Comparing two runs finds what changed, and leaves alone what did not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import compare
from benchmarks.files import write
from benchmarks.intervals import ratio_interval
from benchmarks.measure import Series, rows_of
from benchmarks.rows import Row
from tests.benchmarks.test_rows import CASE


def noisy(middle: float, seed: int, count: int = 30) -> list[float]:
    """Iterations that scatter by some 10 %, and whose turns of three do by as much."""
    generator = np.random.default_rng(seed)
    turns = np.repeat(generator.normal(1, 0.05, count // 3 + 1), 3)[:count]
    return (middle * turns * generator.normal(1, 0.05, count)).tolist()


def run_of(us: float, peer_us: float = 50.0, seed: int = 0, correct: bool = True) -> list[Row]:
    ours = Series("gpudist", noisy(us, seed), correct)
    return rows_of(CASE, [ours, Series("gloo", noisy(peer_us, seed + 1))])


def test_an_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    held = 0
    for seed in range(100):
        low, high = ratio_interval(noisy(10, seed), noisy(12, 1000 + seed))
        assert low < high
        held += low <= 1.2 <= high
    assert 85 <= held <= 100


def test_turns_of_different_lengths_are_drawn_whole() -> None:
    low, high = ratio_interval([1.0] * 23, [2.0] * 21)
    assert (low, high) == (2.0, 2.0)
    # Nine turns at 1, one at 5: seldom more than half of what is drawn.
    assert ratio_interval([1.0] * 30, [1.0] * 27 + [5.0] * 3) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("after", "verdict"), [(10.0, compare.EQUAL), (14.0, compare.SLOWER), (7.0, compare.FASTER)]
)
def test_verdicts(after: float, verdict: str) -> None:
    (found,) = compare.compare(run_of(10.0), run_of(after, 100.0, seed=5))
    assert found.verdict == verdict
    assert found.low is not None and found.high is not None
    assert found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(after / 10.0, rel=0.1)
    assert found.peers_ratio == pytest.approx(2.0, rel=0.1)


def test_a_wrong_result_has_no_speed() -> None:
    (found,) = compare.compare(run_of(10.0), run_of(5.0, correct=False))
    assert found.verdict == compare.WRONG


def called(
    monkeypatch: pytest.MonkeyPatch, folder: Path, b: list[Row], *options: str, old: bool = False
) -> int:
    """The exit status of a comparison with a run of 10 us; one that is ``old`` has no samples."""
    write(run_of(10.0), {}, folder / "a.jsonl")
    write(b, {}, folder / "b.jsonl")
    if old:
        lines = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
        lines[1:] = [{**line, "us": None, "peer_us": None} for line in lines[1:]]
        (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
    monkeypatch.setattr(sys, "argv", ["compare", *files, *options])
    return compare.main()


def test_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = run_of(14.0)
    assert called(monkeypatch, tmp_path, slower) == 0
    assert called(monkeypatch, tmp_path, slower, "--fail-above", "1.5") == 0
    assert capsys.readouterr().err == ""
    assert called(monkeypatch, tmp_path, slower, "--fail-above", "1.1") == 1
    assert capsys.readouterr().err.startswith("above 1.1: halo, 2 ranks, small: 1.40 times")
    assert called(monkeypatch, tmp_path, run_of(14.0, correct=False)) == 1


def test_without_samples_the_ratio_alone_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, tmp_path, run_of(14.0), "--json", old=True) == 0
    (found,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (found["verdict"], found["low"], found["high"]) == ("no samples", None, None)
    assert called(monkeypatch, tmp_path, run_of(14.0), "--fail-above", "1.1", old=True) == 1
    assert called(monkeypatch, tmp_path, run_of(10.5), "--fail-above", "1.1", old=True) == 0


def test_the_table_says_what_is_in_one_run_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    other = [Row(**{**vars(row), "case": "other"}) for row in run_of(10.0)]
    assert called(monkeypatch, tmp_path, [*run_of(7.0), *other]) == 0
    printed = capsys.readouterr().out
    assert "1 cases: 1 faster; only in A: 0, only in B: 1" in printed
    assert "95% interval" in printed and " 0.70 " in printed


def test_runs_without_a_common_case_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [Row(**{**vars(row), "case": "other"}) for row in run_of(10.0)]
    assert called(monkeypatch, tmp_path, other) == 2
    assert "no case in common" in capsys.readouterr().err
