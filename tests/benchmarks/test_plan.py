"""Whether the planner's first choice is among the fastest; misses are reported."""

from __future__ import annotations

from benchmarks.plan import missed

GOOD = {
    "grids": [[1, 2], [2, 1]],
    "measured_seconds": [1.09, 1.0],
    "planning_4096_seconds": 7.0,
}


def test_what_is_missed_is_said() -> None:
    assert missed(GOOD) == []
    assert missed({**GOOD, "measured_seconds": [1.11, 1.0]}) == [
        "[1, 2] was predicted to be best, and [2, 1] is"
    ]
    assert missed({**GOOD, "planning_4096_seconds": 11.0}) == ["4096 ranks took 11.0 s to plan"]
