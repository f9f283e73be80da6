"""The user's plan while it is followed: what it asks for at a path, and what nobody asked about."""

from __future__ import annotations

from math import prod
from typing import Any

from gpudist.convert.plan import Plan, Shape
from gpudist.convert.values import with_shape
from gpudist.errors import ConversionError
from gpudist.partition import CartesianPartition


class Wanted:
    """What a plan asks for.

    Args:
        plan: of the user.
        P: the workers of the network.
    """

    def __init__(self, plan: Plan, P: CartesianPartition) -> None:
        self._plan, self._P = plan, P
        self._asked: set[str] = set()
        self._linear: set[str] = set()

    def trusts(self, path: str) -> bool:
        """Whether the forward of the module is taken to be right."""
        if path in self._plan.trusted:
            self._asked.add(path)
        return path in self._plan.trusted

    def names(self, path: str) -> set[str]:
        """What the plan has something for, as seen from the module at ``path``."""
        given = self._plan.trusted | {row.path for row in self._plan.rows}
        prefix = f"{path}." if path else ""
        return {name.removeprefix(prefix) for name in given if name.startswith(prefix)}

    def repartition(self, path: str) -> Shape | None:
        """The partition chosen for the input of a row; ``None`` leaves the choice."""
        self._asked.add(path)
        row = self._plan.find(path)
        return None if row is None else row.repartition

    def weight(self, path: str) -> Shape | None:
        """The cut chosen for the weight of a linear layer; ``None`` leaves the choice."""
        self._linear.add(path)
        row = self._plan.find(path)
        return None if row is None else row.weight

    def partition(self, shape: Any, dims: int) -> CartesianPartition:
        """The first workers of the network on a grid for a tensor of so many dims.

        Raises:
            ConversionError: there is no such grid.
        """
        is_shape = isinstance(shape, list | tuple) and all(
            isinstance(n, int) and n > 0 for n in shape
        )
        if not is_shape or len(shape) != dims:
            raise ConversionError(
                f"the plan has {shape} for a partition of {dims} axes; give as many "
                "numbers of workers"
            )
        if prod(shape) > self._P.size:
            raise ConversionError(
                f"the plan has {list(shape)}, of {prod(shape)} workers, but the network is on "
                f"{self._P.size}"
            )
        return with_shape(self._P, shape)

    def require_followed(self) -> None:
        """Refuse a plan with edits that nothing in the network answers to."""
        unknown = self._plan.trusted - self._asked
        if unknown:
            raise ConversionError(f"the plan trusts {sorted(unknown)}, which no forward calls")
        for row in self._plan.rows:
            if row.repartition is not None and row.path not in self._asked:
                raise ConversionError(
                    f"{row.path}: the plan repartitions before it, but no forward calls such a "
                    "module or converted function"
                )
            if row.weight is not None and row.path not in self._linear:
                raise ConversionError(
                    f"{row.path}: the plan cuts its weight, but no forward calls a linear layer "
                    "of that path"
                )
