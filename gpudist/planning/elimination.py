"""Find the smallest sums of tables that share variables, by eliminating one variable after another.

Each variable has a few values, and each table the costs of the values of a few variables. To
eliminate a variable, the tables that have it are added, and the result keeps the best of its values
for each choice of the others. This is exact. Chains, residuals and nested skips never need a table
of more than a few variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from math import prod
from typing import Any

# Choices of values for which one table may have entries.
MOST_CHOICES = 1 << 16

# A sum, and the values it stands for: a variable, its value, and those eliminated before it.
_Entry = tuple[float, Any]


@dataclass(frozen=True)
class Table:
    """Costs of choices of values.

    Attributes:
        variables: different variables.
        costs: cost by the values of the variables; choices without a cost are impossible.
    """

    variables: tuple[int, ...]
    costs: dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Solutions:
    """Best choices of a value for every variable.

    Attributes:
        found: sums and values, smallest sum first.
        is_exact: whether no variable was given its value 0 because tables became too large.
    """

    found: list[tuple[float, tuple[int, ...]]]
    is_exact: bool


def solve(sizes: Sequence[int], tables: Iterable[Table], count: int = 1) -> Solutions:
    """Return the ``count`` choices with the smallest sums.

    Args:
        sizes: number of values of each variable.
        tables: tables to add; all variables at their value 0 must be possible.
        count: number of solutions.

    Returns:
        At most ``count`` different solutions.
    """
    domains = [range(size) for size in sizes]
    open_tables = [
        (table.variables, {key: [(cost, ())] for key, cost in table.costs.items()})
        for table in tables
    ]
    of: list[dict[int, tuple[tuple[int, ...], dict[Any, list[_Entry]]]]] = [{} for _ in sizes]
    beside: list[set[int]] = [set() for _ in sizes]
    for number, (variables, cells) in enumerate(open_tables):
        for x in variables:
            of[x][number] = variables, cells
            beside[x].update(variables)
            beside[x].discard(x)
    rest: list[list[_Entry]] = [cells[()] for variables, cells in open_tables if not variables]
    left = {x: _fill(x, beside) for x in range(len(sizes))}
    number, is_exact = len(open_tables), True
    while left:
        x = min(left, key=lambda one: (left[one], one))
        del left[x]
        scope = tuple(sorted(beside[x]))
        while prod(len(domains[one]) for one in scope) > MOST_CHOICES:
            widest = max(scope, key=lambda one: (len(domains[one]), len(beside[one])))
            domains[widest], is_exact = range(1), False
        made = _without(x, scope, list(of[x].values()), domains, count)
        for one in scope:
            for old in of[x]:
                of[one].pop(old, None)
            of[one][number] = scope, made
            beside[one] |= beside[x]
            beside[one] -= {one, x}
        if not scope:
            rest.append(made[()])
        number += 1
        for one in {*scope, *(other for near in scope for other in beside[near])}:
            left[one] = _fill(one, beside)
    return Solutions([(cost, _values(trail, len(sizes))) for cost, trail in _sums(rest, count)],
                     is_exact)  # fmt: skip


def _fill(x: int, beside: Sequence[set[int]]) -> tuple[int, int]:
    # Pairs of neighbours that get a common table, and neighbours.
    near = beside[x]
    return sum(len(near) - 1 - len(near & beside[one]) for one in near), len(near)


def _without(
    x: int,
    scope: tuple[int, ...],
    tables: Sequence[tuple[tuple[int, ...], dict[Any, list[_Entry]]]],
    domains: Sequence[range],
    count: int,
) -> dict[tuple[int, ...], list[_Entry]]:
    place = {one: i for i, one in enumerate((*scope, x))}
    keys = [(cells, [place[one] for one in variables]) for variables, cells in tables]
    made: dict[tuple[int, ...], list[_Entry]] = {}
    for choice in product(*(domains[one] for one in scope)):
        found: list[_Entry] = []
        for value in domains[x]:
            values = (*choice, value)
            parts = [cells.get(tuple([values[i] for i in places])) for cells, places in keys]
            if all(parts):
                sums: Any = _sums(parts, count)
                found += [(cost, (x, value, trail)) for cost, trail in sums]
        if found:
            made[choice] = nsmallest(count, found, key=_cost)
    return made


def _sums(parts: Sequence[Any], count: int) -> list[_Entry]:
    """Return the smallest sums of one entry of each part."""
    found: list[_Entry] = [(0.0, ())]
    for part in parts:
        # The entry (i, j) is no better than (i + 1) * (j + 1) - 1 others.
        found = nsmallest(
            count,
            (
                (a[0] + b[0], (a[1], b[1]))
                for i, a in enumerate(found)
                for b in part[: count // (i + 1)]
            ),
            key=_cost,
        )
    return found


def _cost(entry: _Entry) -> float:
    return entry[0]


def _values(trail: Any, size: int) -> tuple[int, ...]:
    values, left = [0] * size, [trail]
    while left:
        one = left.pop()
        if len(one) == 3:
            values[one[0]] = one[1]
            left.append(one[2])
        else:
            left += one
    return tuple(values)
