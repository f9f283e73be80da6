"""Cases and sides: work to measure, and ways to do it. Ranks without torch import this file."""

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
    """One line of a subject: the same work for gpudist and for every peer.

    Attributes:
        subject: name of the benchmark's file.
        name: description that is unique within the subject.
        ranks: size of the world.
        bytes: bytes moved; benchmarks/README.md defines them for each subject.
        parameters: arguments from which the sides are built.
        output_bytes: size of a rank's largest new result; 0 if results go into existing memory.
    """

    subject: str
    name: str
    ranks: int
    bytes: int
    parameters: dict[str, Any]
    output_bytes: int = 0

    @property
    def has_large_output(self) -> bool:
        """Whether the output is large enough to measure the case with the cost of new pages too."""
        return self.output_bytes >= MIB


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Side:
    """One rank's implementation of a case, by gpudist or a peer.

    Attributes:
        call: the timed function; returns the result.
        is_right: whether a result equals a value computed in another way.
        clear: overwrites the memory for results, so that a stale result is not accepted.
    """

    call: Callable[[], Any]
    is_right: Callable[[Any], bool]
    clear: Callable[[], object] = _nothing


def round_sizes(subject: str, ranks: int) -> list[Case]:
    """Return cases with float32 blocks from 16 B to 64 MiB."""
    return [
        Case(subject, name, ranks, nbytes, {"count": nbytes // 4}, nbytes)
        for name, nbytes in ROUND_SIZES.items()
    ]


def pattern(count: int, seed: int) -> np.ndarray:
    """Return whole numbers below 251 as float32, whose sum over ranks is exact in any order."""
    return ((np.arange(count, dtype=np.int64) * 31 + seed * 17) % 251).astype(np.float32)


def pattern_sum(count: int, ranks: int) -> np.ndarray:
    """Return the sum over ranks of the patterns seeded by rank."""
    return reduce(np.add, (pattern(count, rank) for rank in range(ranks)))


def equals(expected: np.ndarray) -> Callable[[Any], bool]:
    """Return a check that an array or a tensor has exactly these cells."""
    return lambda result: bool(np.array_equal(np.asarray(result), expected))


def memory_copy(nbytes: int) -> Side:
    """Return the ceiling: a plain copy of ``nbytes`` into existing memory, by all ranks at once."""
    x = pattern(nbytes // 4, 3)
    y = np.empty_like(x)

    def copy() -> np.ndarray:
        np.copyto(y, x)
        return y

    return Side(copy, equals(x), lambda: y.fill(0))


def is_empty(result: Any) -> bool:
    """Whether a rank that should receive no block received none."""
    return np.asarray(result).size == 0


def partner(rank: int) -> int:
    """Return the other rank of a pair exchange."""
    return rank ^ 1
