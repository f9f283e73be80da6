"""Whether the planner's first choice is among the fastest, in the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan import missed
from benchmarks.targets import RESULTS

COMMITTED = sorted((RESULTS / "plan").glob("*.json"))
GOOD: dict[str, Any] = {
    "grids": [[1, 2], [2, 1]],
    "measured_seconds": [1.09, 1.0],
    "planning_4096_seconds": 7.0,
}


@pytest.mark.parametrize("path", COMMITTED, ids=[path.stem for path in COMMITTED])
def test_the_first_choice_is_the_fastest_or_close(path: Path) -> None:
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert missed(facts) == []
    assert len(facts["measured_seconds"]) == len(facts["grids"]) > 1


def test_two_and_four_ranks_were_measured() -> None:
    assert {path.stem for path in COMMITTED} == {"unet-2", "unet-4"}


def test_what_is_missed_is_said() -> None:
    assert missed(GOOD) == []
    assert missed({**GOOD, "measured_seconds": [1.11, 1.0]}) == [
        "[1, 2] was predicted to be best, and [2, 1] is"
    ]
    assert missed({**GOOD, "planning_4096_seconds": 11.0}) == ["4096 ranks took 11.0 s to plan"]
