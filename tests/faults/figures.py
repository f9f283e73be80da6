"""Figures of a long run: counts and growth, with their limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One number of a run.

    Attributes:
        name: measured quantity.
        value: number in ``unit``.
        limit: largest allowed value; ``None`` if the figure is only reported.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def is_over(self) -> bool:
        return self.limit is not None and self.value > self.limit

    def __str__(self) -> str:
        allowed = "" if self.limit is None else f", of at most {self.limit:g}"
        return f"{self.name}: {self.value:g} {self.unit}{allowed}" + " OVER" * self.is_over


def growth(values: Sequence[float]) -> float:
    """Return the growth from the median of the first quarter to that of the last.

    Medians are used because single peaks of memory are noise.

    Raises:
        ValueError: there are fewer than four values.
    """
    if len(values) < 4:
        raise ValueError(f"{len(values)} samples show no growth; take at least four")
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[:quarter])


def spread(values: Sequence[float]) -> float:
    """Return the difference of the largest and the smallest value, for constant quantities."""
    return max(values) - min(values)


def worst(of_rank: Callable[[Sequence[float]], float], series: Sequence[Sequence[float]]) -> float:
    """Return the largest over the ranks."""
    return max(of_rank(values) for values in series)
