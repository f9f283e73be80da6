"""Targets, and the table that says which are met."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.files import read, write
from benchmarks.targets import RESULTS, Target, table, targets


def test_a_limit_is_a_multiple_and_a_constant() -> None:
    assert Target("x", "halo", "small", "gloo", 1.5, 5.0).limit_us(10.0) == 20.0


def written(folder: Path, **changed: Any) -> Path:
    """The committed results, with what is ``changed`` in the rows of the smallest message."""
    for path in RESULTS.glob("*-2.jsonl"):
        (run,) = read(path)
        rows = [
            replace(row, **changed)
            if (row.subject, row.case) == ("messages", "4 KiB, bare")
            else row
            for row in run.rows
        ]
        write(rows, run.environment, folder / path.name)
    return folder


def test_what_takes_too_long_is_not_reached(tmp_path: Path) -> None:
    lines = table(written(tmp_path, us_median=70.0, peer_us_median=60.0)).splitlines()
    assert lines[2].endswith("| 1.17 | 1 x | no, over by 10.0 us |")
    assert len(lines) == 2 + len(list(targets()))


def test_a_wrong_result_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="4 KiB"):
        table(written(tmp_path, correct=False))
