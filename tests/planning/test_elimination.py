"""Smallest sums of tables, compared with all choices."""

from __future__ import annotations

import random
from itertools import product
from math import inf, prod

import pytest

from gpudist.planning import elimination
from gpudist.planning.elimination import Table, solve

MOST_CHOICES = 2000


def every_sum(sizes: list[int], tables: list[Table]) -> list[float]:
    found = [
        sum(table.costs.get(tuple(choice[x] for x in table.variables), inf) for table in tables)
        for choice in product(*map(range, sizes))
    ]
    return sorted(cost for cost in found if cost < inf)


def network(draw: random.Random) -> tuple[list[int], list[Table]]:
    """Return the tables of a chain with skips, some of whose choices are impossible."""
    sizes: list[int] = []
    while prod(sizes) * 4 <= MOST_CHOICES:
        sizes.append(draw.choice([1, 2, 2, 4]))
    ends = [(i, i + 1) for i in range(len(sizes) - 1)]
    ends += [tuple(sorted(draw.sample(range(len(sizes)), 2))) for _ in range(draw.randint(0, 5))]  # pyright: ignore
    tables = [
        Table((x,), {(v,): draw.random() for v in range(sizes[x])}) for x in range(len(sizes))
    ]
    for a, b in ends:
        choices = product(range(sizes[a]), range(sizes[b]))
        # The first choice must be possible.
        costs = {key: draw.random() for key in choices if not any(key) or draw.random() < 0.8}
        tables.append(Table((a, b), costs))
    return sizes, tables


@pytest.mark.parametrize("seed", range(50))
def test_the_best_are_those_of_all_choices(seed: int) -> None:
    sizes, tables = network(random.Random(seed))
    solved = solve(sizes, tables, 10)
    costs = [cost for cost, _ in solved.best]
    assert solved.is_exact
    assert costs == pytest.approx(every_sum(sizes, tables)[:10])
    assert len({values for _, values in solved.best}) == len(costs)
    for cost, values in solved.best:
        own = [table.costs[tuple(values[x] for x in table.variables)] for table in tables]
        assert cost == pytest.approx(sum(own))


def test_long_chains_with_skips_are_exact() -> None:
    """A third of the variables prefers each value, but changes between neighbours are dear."""
    size = 900
    tables = [Table((x,), {(0,): 1.0, (1,): 1.0 + (x % 3 - 1)}) for x in range(size)]
    same = {(0, 0): 0.0, (1, 1): 0.0, (0, 1): 10.0, (1, 0): 10.0}
    tables += [Table((x, x + 1), same) for x in range(size - 1)]
    tables += [Table((x, x + 3), same) for x in range(0, size - 3, 3)]
    solved = solve([2] * size, tables, 3)
    assert solved.is_exact
    assert [cost for cost, _ in solved.best] == pytest.approx([size, size, size + 9])


def test_tables_that_would_be_too_large_keep_the_first_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elimination, "MOST_CHOICES", 8)
    size = 7
    tables = [Table((x,), {(0,): 1.0, (1,): 0.5}) for x in range(size)]
    tables += [
        Table((a, b), {key: 0.0 for key in product(range(2), range(2))})
        for a in range(size)
        for b in range(a)
    ]
    solved = solve([2] * size, tables)
    assert not solved.is_exact
    assert 0.5 * size < solved.best[0][0] < size
