"""Count what a rank sends in a training step, by the totals of operators."""

from __future__ import annotations

import re
from typing import Any

import gpudist
from gpudist.world.partition import Partition

_BOXING = re.compile(r"boxing, (\(.*\)) -> (\(.*\))")
_ATTRIBUTE = re.compile(r"split\([^)]*\)|broadcast|partial_sum")
# Ranks agree on shapes before the first step, with these; no later step does.
_AGREEMENT = ("allgather_data", "broadcast_data")


class Sent:
    """Counter of what this rank sends within ``with`` blocks; the counts add up.

    Messages by which ranks agree on shapes are left out.

    Attributes:
        messages: number of messages.
        nbytes: bytes in them.
        repartitioned_bytes: those of boxings for which :func:`repartitions` is true.
    """

    def __init__(self, P_world: Partition) -> None:
        self._P_world = P_world
        self.messages = self.nbytes = self.repartitioned_bytes = 0

    def __enter__(self) -> None:
        gpudist.stats(reset=True, P_world=self._P_world)

    def __exit__(self, *raised: Any) -> None:
        for row in gpudist.stats(P_world=self._P_world):
            if not row.operator.startswith(_AGREEMENT):
                self.messages += row.messages
                self.nbytes += row.sent_bytes
                self.repartitioned_bytes += row.sent_bytes * repartitions(row.operator)


def repartitions(operator: str) -> bool:
    """Return whether an operator's row has the bytes of an automatic repartition.

    A rule boxes an input whose layout does not fit. This is a repartition if the box on some axis
    becomes another, and a reduction if partial sums are all that is replaced. Movements that travel
    together have one row: it is a repartition if one of them is. Backward counts like its forward.
    """
    return any(
        _changes(*map(_ATTRIBUTE.findall, boxing.groups()))
        for part in re.split(r" \+ |, then ", operator)
        if (boxing := _BOXING.search(part)) is not None
    )


def _changes(source: list[str], target: list[str]) -> bool:
    if len(source) != len(target) or source == target:
        # Other workers, or other axes.
        return True
    return any(a not in (b, "partial_sum") for a, b in zip(source, target, strict=True))
