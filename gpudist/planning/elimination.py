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
        best: sums and values, smallest sum first.
        is_exact: whether no variable was given its value 0 because tables became too large.
    """

    best: list[tuple[float, tuple[int, ...]]]
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
        x = min(left, key=lambda y: (left[y], y))
        del left[x]
        scope = tuple(sorted(beside[x]))
        while prod(len(domains[y]) for y in scope) > MOST_CHOICES:
            widest = max(scope, key=lambda y: (len(domains[y]), len(beside[y])))
            domains[widest], is_exact = range(1), False
        joined = _without(x, scope, list(of[x].values()), domains, count)
        for y in scope:
            for old in of[x]:
                of[y].pop(old, None)
            of[y][number] = scope, joined
            beside[y] |= beside[x]
            beside[y] -= {y, x}
        if not scope:
            rest.append(joined[()])
        number += 1
        for y in {*scope, *(other for near in scope for other in beside[near])}:
            left[y] = _fill(y, beside)
    return Solutions([(cost, _values(trail, len(sizes))) for cost, trail in _sums(rest, count)],
                     is_exact)  # fmt: skip


def _fill(x: int, beside: Sequence[set[int]]) -> tuple[int, int]:
    # Pairs of neighbours that get a common table, and neighbours.
    near = beside[x]
    return sum(len(near) - 1 - len(near & beside[y]) for y in near), len(near)


def _without(
    x: int,
    scope: tuple[int, ...],
    tables: Sequence[tuple[tuple[int, ...], dict[Any, list[_Entry]]]],
    domains: Sequence[range],
    count: int,
) -> dict[tuple[int, ...], list[_Entry]]:
    place = {y: i for i, y in enumerate((*scope, x))}
    keys = [(cells, [place[y] for y in variables]) for variables, cells in tables]
    best: dict[tuple[int, ...], list[_Entry]] = {}
    for choice in product(*(domains[y] for y in scope)):
        entries: list[_Entry] = []
        for value in domains[x]:
            values = (*choice, value)
            parts = [cells.get(tuple([values[i] for i in places])) for cells, places in keys]
            if all(parts):
                sums: Any = _sums(parts, count)
                entries += [(cost, (x, value, trail)) for cost, trail in sums]
        if entries:
            best[choice] = nsmallest(count, entries, key=_cost)
    return best


def _sums(parts: Sequence[Any], count: int) -> list[_Entry]:
    """Return the smallest sums of one entry of each part."""
    entries: list[_Entry] = [(0.0, ())]
    for part in parts:
        # The entry (i, j) is no better than (i + 1) * (j + 1) - 1 others.
        entries = nsmallest(
            count,
            (
                (a[0] + b[0], (a[1], b[1]))
                for i, a in enumerate(entries)
                for b in part[: count // (i + 1)]
            ),
            key=_cost,
        )
    return entries


def _cost(entry: _Entry) -> float:
    return entry[0]


def _values(trail: Any, size: int) -> tuple[int, ...]:
    values, left = [0] * size, [trail]
    while left:
        part = left.pop()
        if len(part) == 3:
            values[part[0]] = part[1]
            left.append(part[2])
        else:
            left += part
    return tuple(values)
