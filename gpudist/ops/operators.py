"""Table of the operators, which tests, documentation and the self-check read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt
from typing import Any, TypeVar

from gpudist.world.partition import CartesianPartition, Partition

Kind = TypeVar("Kind", bound="type[Any]")


@dataclass(frozen=True)
class OperatorRow:
    """Row of ``OPERATORS``.

    Attributes:
        kind: class of the module.
        adjoint: name of the function that computes the adjoint.
        sample: creates the module on a grid of workers with two axes.
        shape: global shape of the sample's input, two extents, balanced over the module's ``P_x``.
    """

    kind: type[Any]
    adjoint: str
    sample: Callable[[Any, CartesianPartition], Any]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the function, such as ``"sum_reduce"``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.kind.__name__).lower()

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(sys.modules[self.kind.__module__], self.name)

    def make(self, P_world: Partition) -> Any:
        """Return the sample's module on all workers of ``P_world``, on a grid close to a square."""
        size = P_world.size
        short = next(n for n in range(isqrt(size), 0, -1) if size % n == 0)
        return self.sample(self.kind, P_world.grid(short, size // short))


OPERATORS: list[OperatorRow] = []
"""Rows of all operators, in the order in which ``gpudist.ops`` imports them."""


def operator(
    adjoint: str, sample: Callable[[Any, CartesianPartition], Any], shape: tuple[int, ...]
) -> Callable[[Kind], Kind]:
    """Add the decorated module to ``OPERATORS``; for the arguments see :class:`OperatorRow`."""

    def enter(kind: Kind) -> Kind:
        OPERATORS.append(OperatorRow(kind, adjoint, sample, shape))
        return kind

    return enter
