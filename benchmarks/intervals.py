"""The confidence interval of a ratio of medians, by bootstrap over the turns of a series."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.measure import ROUNDS

RESAMPLES = 2000
LEVEL = 0.95


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return bounds of ``median(b) / median(a)`` at confidence ``LEVEL``; the same in every run.

    Iterations of one turn are correlated, since a disturbance outlasts an iteration. Whole turns
    are therefore resampled with replacement, not single iterations.
    """
    generator = np.random.default_rng(0)
    ratios = _medians(b, generator) / _medians(a, generator)
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _medians(us: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    turns = np.array_split(np.asarray(us), min(ROUNDS, len(us)))
    table = np.full((len(turns), max(turn.size for turn in turns)), np.nan)
    for row, turn in zip(table, turns, strict=True):
        row[: turn.size] = turn
    drawn = table[generator.integers(len(turns), size=(RESAMPLES, len(turns)))]
    return np.nanmedian(drawn.reshape(RESAMPLES, -1), axis=1)
