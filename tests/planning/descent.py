"""Choices of layouts beside which the exact optimum is judged: random ones, and single changes."""

from __future__ import annotations

import random

from gpudist.planning.layout_choices import Choice, LayoutChoices
from gpudist.planning.layout_costs import State

# Stands for a cost that a table does not have, so that changes lead to possible choices.
_IMPOSSIBLE_S = 1e6
# Most stretches of functions of a random choice, and tries to find them.
_STRETCHES, _TRIES = 12, 40


def stretch(
    found: LayoutChoices, start: int, stop: int, state: State, before: Choice | None = None
) -> Choice:
    """Return the choice of a state for the functions from ``start`` to ``stop``.

    Args:
        found: layouts to choose from.
        start, stop: first and last function.
        state: their state.
        before: choice for all others; by default the grid's.
    """
    return tuple(
        (found.value(x, state) or 0)
        if start <= variable.node <= stop
        else (0 if before is None else before[x])
        for x, variable in enumerate(found.variables)
    )


def random_choice(found: LayoutChoices, draw: random.Random) -> Choice:
    """Return a possible choice of several random stretches, one over the other."""
    choice: Choice = (0,) * len(found.variables)
    wanted = draw.randint(1, _STRETCHES)
    for _ in range(_TRIES):
        start = draw.randrange(len(found.nodes))
        stop = min(len(found.nodes) - 1, start + int(draw.expovariate(8 / len(found.nodes))))
        other = stretch(found, start, stop, draw.choice(found.states), choice)
        if other != choice and found.cost(other) is not None:
            choice, wanted = other, wanted - 1
            if not wanted:
                break
    return choice


class Descent:
    """Local search among choices, by changes of the layout of one function or one result.

    Functions that must compute alike, since one changes the memory of the other, change together.

    Args:
        found: layouts to choose from, with the tables of their costs.
    """

    def __init__(self, found: LayoutChoices) -> None:
        groups = {x: {x} for x in range(len(found.variables))}
        for a, b in found.graph.tied:
            both = groups[a] | groups[b]
            groups.update(dict.fromkeys(both, both))
        self._changes: list[tuple[tuple[int, ...], list[Choice], list[int]]] = []
        for members in {tuple(sorted(one)) for one in groups.values()}:
            choices = {tuple(found.value(x, s) or 0 for x in members) for s in found.states}
            if len(choices) > 1:
                tables = [
                    i for i, t in enumerate(found.tables) if not set(members).isdisjoint(t[0])
                ]
                self._changes.append((members, sorted(choices), tables))
        self._tables = found.tables

    def improve(self, choice: Choice) -> Choice:
        """Return a choice that no single change makes faster, reached from ``choice``."""
        values = list(choice)
        is_better = True
        while is_better:
            is_better = False
            for members, choices, tables in self._changes:
                best = self._seconds(values, tables) - 1e-12
                after: Choice = tuple(values[x] for x in members)
                for one in choices:
                    self._set(values, members, one)
                    seconds = self._seconds(values, tables)
                    if seconds < best:
                        best, after, is_better = seconds, one, True
                self._set(values, members, after)
        return tuple(values)

    def _seconds(self, values: list[int], tables: list[int]) -> float:
        found = 0.0
        for number in tables:
            variables, costs = self._tables[number]
            cost = costs.get(tuple([values[x] for x in variables]))
            found += _IMPOSSIBLE_S if cost is None else cost[0]
        return found

    @staticmethod
    def _set(values: list[int], members: tuple[int, ...], own: Choice) -> None:
        for x, value in zip(members, own, strict=True):
            values[x] = value
