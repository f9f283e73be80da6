"""Whether the order of plans is the predicted one; misses are reported."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plans import paired, summary


def rows(*times: tuple[float, float], searched: int = 0) -> list[dict[str, Any]]:
    """Return rows with these predicted and measured times, of which the last one is a grid."""
    kinds = ["search"] * (len(times) - 1) + ["grid"]
    return [
        {
            "network": "U-Net", "batch": 1, "kind": kind, "is_searched": number == searched,
            "predicted_us": predicted, "measured_us": measured,
        }
        for number, (kind, (predicted, measured)) in enumerate(zip(kinds, times, strict=True))
    ]  # fmt: skip


def test_what_is_missed_is_said() -> None:
    good = summary(rows((1.0, 2.0), (1.5, 3.0), (2.0, 4.1)))
    assert good.missed == [] and good.rank_correlation == pytest.approx(1)
    assert "searched plan 0.0 % slower" in str(good) and "0.488 of the best grid" in str(good)
    slow = summary(rows((1.0, 2.2), (1.5, 2.0), (2.0, 4.0)))
    assert slow.rank_correlation == pytest.approx(0.5)
    assert slow.missed == [
        f"U-Net, batch 1: {words}" for words in ("rank correlation", "slower than the fastest")
    ]
    far = summary(rows((1.0, 2.0), (1.0, 2.0), (2.0, 3.0)))
    assert far.rank_correlation == pytest.approx(1)
    assert far.missed == ["U-Net, batch 1: ratio to the best grid"]


def test_one_grid_may_be_the_searched_plan() -> None:
    kept = summary(rows((1.0, 2.0), (2.0, 3.0), (1.0, 2.0), searched=2))
    assert kept.predicted == kept.measured == 1.0 and kept.missed == []


def test_rounds_of_a_slow_machine_count_for_all_plans_alike() -> None:
    steps = [[10.0] * 4, [12.0] * 4, [11.0] * 4]
    assert paired(steps) == [10.0, 12.0, 11.0]
    # The machine is half as fast in two rounds, and a single step of the first plan is disturbed.
    slow = [[t * (2 if turn in (1, 2) else 1) for turn, t in enumerate(own)] for own in steps]
    slow[0][3] = 30.0
    first, second, third = paired(slow)
    assert second / third == pytest.approx(12 / 11)
    assert first / third == pytest.approx(10 / 11)
