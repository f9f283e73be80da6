"""Targets on a GPU, and the table that says which are met."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import SUBJECTS
from benchmarks.gpu.targets import Target, table, targets


def test_targets_are_of_cases_that_are_measured() -> None:
    cases = {
        (subject, case.name)
        for subject in SUBJECTS
        for case in importlib.import_module(f"benchmarks.gpu.{subject}").cases(1)
    }
    assert {(target.subject, target.case) for target in targets()} <= cases
    assert {target.subject for target in targets()} == set(SUBJECTS)


def test_names_of_cases_tell_them_apart() -> None:
    for subject in SUBJECTS:
        names = [c.name for c in importlib.import_module(f"benchmarks.gpu.{subject}").cases(1)]
        assert len(set(names)) == len(names)


def row(target: Target, us: float, peer: str | None = None, correct: bool = True) -> dict[str, Any]:
    return {
        "subject": target.subject, "case": target.case, "us_median": us,
        "peer": peer or target.peer, "peer_us_median": 100.0, "correct": correct,
    }  # fmt: skip


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    for subject in {row["subject"] for row in rows}:
        chosen = [row for row in rows if row["subject"] == subject]
        lines = [json.dumps(line) + "\n" for line in ({"environment": {}}, *chosen)]
        (folder / f"gpu-{subject}.jsonl").write_text("".join(lines))
    return folder


def test_lines_say_what_is_reached_missed_and_not_measured(tmp_path: Path) -> None:
    of = {target.subject: target for target in targets() if target.peer == "forward"}
    adjoint = [target for target in targets() if target.subject == "adjoint"]
    times = [114.0, *[116.0] * (len(adjoint) - 1)]
    rows = [row(target, us) for target, us in zip(adjoint, times, strict=True)]
    lines = table(written(tmp_path, rows)).splitlines()[2:]
    assert len(lines) == len(list(targets()))
    found = [line for line in lines if line.startswith("| adjoint")]
    assert "forward: 100.0 us | 1.14 | 1.15 x | yes |" in found[0]
    assert found[1].endswith("| 1.15 x | no, over by 1.0 us |")
    others = [line for line in lines if not line.startswith("| adjoint")]
    assert others and all(line.endswith("| not measured |") for line in others)
    assert set(of) == {"adjoint"}


def test_without_torchs_messages_to_itself_those_of_its_fake_group_count(tmp_path: Path) -> None:
    chosen = [target for target in targets() if target.subject == "enqueue"]
    rows = [row(t, 9.0, t.fallback or "batch_isend_irecv, fake") for t in chosen]
    lines = table(written(tmp_path, rows)).splitlines()[2:]
    found = [line for line in lines if line.startswith("| enqueue")]
    assert "batch_isend_irecv, fake: 100.0 us | 0.09 | 0.5 x | yes |" in found[0]
    assert found[-1].endswith("| 9.0 us |  |  | 10 us | yes |")


def test_a_wrong_result_is_no_result(tmp_path: Path) -> None:
    rows = [row(target, 1.0, correct=False) for target in targets() if target.subject == "adjoint"]
    with pytest.raises(ValueError, match="no correct row"):
        table(written(tmp_path, rows))
