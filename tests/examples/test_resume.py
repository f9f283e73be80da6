"""Training whose workers are killed continues as if they had not been.

Ten kills: ``python -m tests.examples.killed_training --kills 10``.
"""

from __future__ import annotations

from pathlib import Path

from tests import warm
from tests.every import EVERY
from tests.examples.killed_training import differences, killed, on_threads

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
