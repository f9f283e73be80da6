"""Table of the operators, which tests and documentation read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from gpudist.world.partition import Partition

Kind = TypeVar("Kind", bound="type[Any]")


@dataclass(frozen=True)
class OperatorRow:
    """Row of ``OPERATORS``.

    Attributes:
        kind: class of the module.
        adjoint: name of the function that computes the adjoint.
        sample: creates the module on a world of four ranks.
        shape: global shape of the sample's input, which is balanced over its ``P_x``.
    """

    kind: type[Any]
    adjoint: str
    sample: Callable[[Any, Partition], Any]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name of the function, such as ``"sum_reduce"``."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", self.kind.__name__).lower()

    @property
    def function(self) -> Callable[..., Any]:
        return getattr(sys.modules[self.kind.__module__], self.name)

    def make(self, P_world: Partition) -> Any:
        """Return the sample's module on ``P_world``, which has four ranks."""
        return self.sample(self.kind, P_world)


OPERATORS: list[OperatorRow] = []
"""Rows of all operators, in the order in which ``gpudist.ops`` imports them."""


def operator(
    adjoint: str, sample: Callable[[Any, Partition], Any], shape: tuple[int, ...]
) -> Callable[[Kind], Kind]:
    """Add the decorated module to ``OPERATORS``; for the arguments see :class:`OperatorRow`."""

    def enter(kind: Kind) -> Kind:
        OPERATORS.append(OperatorRow(kind, adjoint, sample, shape))
        return kind

    return enter
