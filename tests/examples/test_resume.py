"""Training whose workers are killed continues as if they had not been.

Ten kills: ``python -m tests.examples.killed_training --kills 10``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import warm
from tests.every import EVERY
from tests.examples.killed_training import Outcome, differences, killed, on_threads

RANKS, STEPS, SAVED_EVERY = 2, 8, 1
KILLS = 2 if EVERY else 1


def test_killed_training_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    for folder in folders:
        folder.mkdir()
    expected = on_threads(folders[0], RANKS, STEPS, SAVED_EVERY)
    assert sorted(expected.losses) == list(range(STEPS))
    found = killed(folders[1], RANKS, STEPS, SAVED_EVERY, KILLS, 3, warm.python())
    assert len(found.kills) == KILLS
    assert differences(found, expected) == []


def test_differences_are_found() -> None:
    whole = Outcome("abc", {0: ["0x1p0"], 1: ["0x1p-1"]}, [])
    assert differences(replace(whole, losses={0: ["0x1p0"] * 2, 1: ["0x1p-1"]}), whole) == []
    assert len(differences(replace(whole, digest="abd"), whole)) == 1
    assert len(differences(replace(whole, losses={0: ["0x1p0"]}), whole)) == 1
    wrong = {0: ["0x1p0", "0x1.8p0"], 1: ["0x1p-1"]}
    assert differences(replace(whole, losses=wrong), whole) == ["the loss of step 0 is 0x1.8p0"]
