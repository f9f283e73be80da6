"""What is measured, and one way to do it. Ranks without torch read this file too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
ROUND_SIZES = {
    **{"16 B": 16, "4 KiB": 4 * KIB, "64 KiB": 64 * KIB},
    **{"1 MiB": MIB, "4 MiB": 4 * MIB, "64 MiB": 64 * MIB},
}


@dataclass(frozen=True)
class Case:
    """One line of a subject: the same work for ours and for every peer.

    Attributes:
        subject, name: the file it is from, and what tells it from the subject's other cases.
        ranks: size of the world.
        bytes: moved; which ones, docs/benchmarks.md says for each subject.
        parameters: what the sides are made from.
        output_bytes: largest new result of a rank; 0 for a case into existing memory.
    """

    subject: str
    name: str
    ranks: int
    bytes: int
    parameters: dict[str, Any]
    output_bytes: int = 0

    @property
    def has_large_output(self) -> bool:
        """Whether what new pages cost shows, so that it is measured with them too."""
        return self.output_bytes >= MIB


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Side:
    """One rank's way to do a case: ours, or a peer's.

    Attributes:
        call: what is timed; returns the result.
        is_right: whether a result equals what was computed in another way.
        clear: wipes existing memory that the result goes to, so that an old one is not found right.
    """

    call: Callable[[], Any]
    is_right: Callable[[Any], bool]
    clear: Callable[[], object] = _nothing


def round_sizes(subject: str, ranks: int) -> list[Case]:
    """Blocks of float32 from 16 B to 64 MiB."""
    return [
        Case(subject, name, ranks, nbytes, {"count": nbytes // 4}, nbytes)
        for name, nbytes in ROUND_SIZES.items()
    ]


def pattern(count: int, seed: int) -> np.ndarray:
    """Whole numbers below 251 as float32, so that a sum over ranks is exact in any order."""
    return ((np.arange(count, dtype=np.int64) * 31 + seed * 17) % 251).astype(np.float32)


def pattern_sum(count: int, ranks: int) -> np.ndarray:
    """The sum over ranks of the patterns that have their ranks as seeds."""
    return reduce(np.add, (pattern(count, rank) for rank in range(ranks)))


def equals(expected: np.ndarray) -> Callable[[Any], bool]:
    """Whether an array, or a tensor, has exactly these cells."""
    return lambda result: bool(np.array_equal(np.asarray(result), expected))


def memory_copy(nbytes: int) -> Side:
    """A plain copy of so many bytes into existing memory, by all ranks at once: the ceiling."""
    x = pattern(nbytes // 4, 3)
    y = np.empty_like(x)

    def copy() -> np.ndarray:
        np.copyto(y, x)
        return y

    return Side(copy, equals(x), lambda: y.fill(0))


def is_empty(result: Any) -> bool:
    """Whether a rank that gets no block got none."""
    return np.asarray(result).size == 0


def partner(rank: int) -> int:
    """The other rank of a pair exchange."""
    return rank ^ 1
