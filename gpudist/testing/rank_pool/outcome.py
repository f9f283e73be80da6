"""Outcome of a rank, and the report of a run that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpudist import errors


@dataclass(frozen=True)
class Outcome:
    """Result of one rank: a value, or an error and the text that explains it."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    world_ended: bool = False

    @property
    def distance(self) -> int:
        """Distance of the error from a root cause; an echoed error has the largest."""
        if isinstance(self.error, errors.PeerFailure):
            return 0 if self.error.rank == self.rank else 4
        if isinstance(self.error, errors.CollectiveTimeout):
            return 3
        return 2 if isinstance(self.error, errors.PlanMismatch) else 1


class RanksFailed(Exception):
    """Failure of a function on some ranks of a pool; the text shows all, the root cause first.

    Attributes:
        root: outcome of the rank that failed first.
        outcomes: outcomes of all ranks that failed, the root first.
    """

    def __init__(self, size: int, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = sorted(outcomes, key=lambda outcome: (outcome.distance, outcome.rank))
        self.root = self.outcomes[0]
        same: dict[str, list[int]] = {}
        for outcome in self.outcomes:
            same.setdefault(outcome.text.rstrip(), []).append(outcome.rank)
        parts = [
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} {text}"
            for text, ranks in same.items()
        ]
        cause = f"{type(self.root.error).__name__} on rank {self.root.rank}: {self.root.error}"
        parts.insert(0, f"{cause.splitlines()[0]} ({len(outcomes)} of {size} ranks failed)")
        super().__init__("\n\n".join(parts))
