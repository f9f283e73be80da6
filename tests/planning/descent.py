"""Choices of layouts beside which the exact optimum is judged: stretches, and single changes."""

from __future__ import annotations

from gpudist.planning.layout_choices import Choice, LayoutChoices
from gpudist.planning.layout_costs import State

# Stands for a cost that a table does not have, so that changes lead to possible choices.
_IMPOSSIBLE_S = 1e6


def stretch(found: LayoutChoices, start: int, stop: int, state: State) -> Choice:
    """Return the choice of a state for the functions from ``start`` to ``stop``."""
    return tuple(
        (start <= variable.node <= stop and found.value(x, state)) or 0
        for x, variable in enumerate(found.variables)
    )


class Descent:
    """Local search among choices, by changes of one function's or one result's layout.

    Args:
        choices: layouts to choose from, with the tables of their costs.
    """

    def __init__(self, choices: LayoutChoices) -> None:
        self._sizes = choices.sizes
        self._tables = [[t for t in choices.tables if x in t[0]] for x in range(len(self._sizes))]

    def improve(self, choice: Choice) -> Choice:
        """Return a choice that no single change makes faster, reached from ``choice``."""
        values = list(choice)
        is_better = True
        while is_better:
            is_better = False
            for x, size in enumerate(self._sizes):
                if size == 1:
                    continue
                costs = [self._seconds(values, x, value) for value in range(size)]
                best = min(range(size), key=costs.__getitem__)
                if costs[best] < costs[values[x]] - 1e-12:
                    values[x], is_better = best, True
        return tuple(values)

    def _seconds(self, values: list[int], x: int, value: int) -> float:
        """Return the costs of the tables of ``x`` with another value."""
        before, values[x] = values[x], value
        found = 0.0
        for variables, costs in self._tables[x]:
            cost = costs.get(tuple([values[one] for one in variables]))
            found += _IMPOSSIBLE_S if cost is None else cost[0]
        values[x] = before
        return found
