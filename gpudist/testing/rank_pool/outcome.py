"""How a rank ended, and the report of a run that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpudist import errors


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, or with an error and the text that explains it."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    text: str = ""
    world_ended: bool = False

    @property
    def distance(self) -> int:
        """How far the error is from a root cause; the highest is an echo of a peer's."""
        if isinstance(self.error, errors.PeerFailure):
            return 0 if self.error.rank == self.rank else 4
        if isinstance(self.error, errors.CollectiveTimeout):
            return 3
        return 2 if isinstance(self.error, errors.PlanMismatch) else 1


class RanksFailed(Exception):
    """A function failed on some ranks of a pool; the text shows all of them, the root cause first.

    Attributes:
        root: the outcome of the rank where it began.
        outcomes: those of every rank that failed, the root first.
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
