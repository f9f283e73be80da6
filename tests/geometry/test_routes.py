"""Routes move as few cells as an exhaustive search over sequences of messages finds.

Each cell travels on its own, so the fewest messages per cell, summed over the cells, is the fewest
of the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from gpudist.errors import ShapeError
from gpudist.geometry import blocks, boxes, layout as layouts, routes
from gpudist.geometry.boxes import Plan, Stage
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, partial_sum, split
from gpudist.geometry.routes import plan, route, volume
from tests.geometry.oracle import Array, PerRank, assert_linear_operator, carry_out, exactly
from tests.geometry.strategies import cuts_in, shapes, workers

Held = frozenset[int]  # sums of terms a rank can make, each a bit mask of terms
State = tuple[Held, ...]
Groups = tuple[tuple[int, ...], ...]

S, B, P = split, broadcast, partial_sum


def holds(layout: Layout, kind: str, cell: tuple[int, ...]) -> Groups:
    """Return the groups of ranks of ``layout.groups`` that have a cell."""
    (ranks,) = [
        groups
        for box, groups in layout.groups(kind).items()
        if all(a <= i < b for a, i, b in zip(box.start, cell, box.stop, strict=True))
    ]
    return tuple(map(tuple, ranks))


def closed(masks: Held) -> Held:
    """Return the masks with all sums of disjoint ones."""
    found = set(masks)
    while True:
        more = {a | b for a, b in combinations(found, 2) if not a & b} - found
        if not more:
            return frozenset(found)
        found |= more


def is_complete(state: State, copies: Groups, full: int) -> bool:
    """Whether one sum or none per position, held by all its copies, can cover each term once."""
    reached = {0}
    for ranks in zip(*copies, strict=True):
        common = frozenset.intersection(*(state[rank] for rank in ranks))
        reached |= {a | b for a, b in product(reached, common) if not a & b}
    return full in reached


@cache
def can_finish(state: State, copies: Groups, full: int, budget: int) -> bool:
    """Return whether ``budget`` messages are enough."""
    if is_complete(state, copies, full):
        return True
    open_copies = sum(not is_complete(state, (copy,), full) for copy in copies) or 1
    if open_copies > budget:
        return False
    for sender, receiver in product(range(len(state)), repeat=2):
        for mask in state[sender] - state[receiver]:
            new = list(state)
            new[receiver] = closed(state[receiver] | {mask})
            if can_finish(tuple(new), copies, full, budget - 1):
                return True
    return False


def fewest_messages(terms: Groups, copies: Groups, ranks: int) -> int:
    held = [frozenset(1 << j for j, group in enumerate(terms) if r in group) for r in range(ranks)]
    state = tuple(closed(masks) for masks in held)
    budget = 0
    while not can_finish(state, copies, (1 << len(terms)) - 1, budget):
        budget += 1
    return budget


def fewest_cells(source: Layout, target: Layout, ranks: int) -> int:
    """Return the minimum for a map and its adjoint, which boxes gradients and moves as many."""
    adjoint = (target.dual, source.dual)
    return sum(
        max(
            fewest_messages(holds(a, "broadcast", cell), holds(b, "partial_sum", cell), ranks)
            for a, b in ((source, target), adjoint)
        )
        for cell in np.ndindex(source.shape)
    )


def all_sbps(axes: int, dims: int) -> list[NdSbp]:
    return list(product((*map(S, range(dims)), B, P), repeat=axes))


GRIDS = [
    ((0, 1), (2,), (0, 1), (2,)),
    ((0, 1, 2), (3,), (0, 1, 2), (3,)),
    ((0, 1, 2, 3), (4,), (0, 1, 2, 3), (4,)),
    ((0, 1, 2, 3), (2, 2), (0, 1, 2, 3), (2, 2)),
    ((0, 1), (2,), (2, 3), (2,)),
    ((0, 1), (2,), (1, 2), (2,)),
    ((0, 1, 2), (3,), (3,), (1,)),
    ((0, 1, 2, 3), (2, 2), (3, 1, 0, 2), (4,)),
    ((0, 1), (2,), (0, 1, 2, 3), (2, 2)),
]


@pytest.mark.parametrize("shape", [(), (5,), (3, 2)], ids=str)
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_fewest_cells_of_all_ways(
    grids: tuple[tuple[int, ...], ...], shape: tuple[int, ...]
) -> None:
    """Every pair of attributes, over uneven dims and a number without any."""
    ranks_x, grid_x, ranks_y, grid_y = grids
    worse: list[str] = []
    pairs = product(all_sbps(len(grid_x), len(shape)), all_sbps(len(grid_y), len(shape)))
    for a, b in pairs:
        source, target = Layout(ranks_x, grid_x, a, shape), Layout(ranks_y, grid_y, b, shape)
        best = fewest_cells(source, target, 4)
        if volume(route(source, target)) != best:
            worse.append(f"{a} -> {b}: {volume(route(source, target))}, not {best}")
    assert not worse


def test_fewest_cells_between_explicit_cuts() -> None:
    """Only the cells that change their owner move, and sums are added up where they are wanted."""
    ranks, grid, shape = (0, 1, 2, 3), (2, 2), (3, 2)
    ends: list[NdSbp] = [
        (S(0, [1, 2]), B), (S(0, [0, 3]), P), (P, S(0, [3, 0])), (S(1, [2, 0]), S(0, [1, 2])),
        (S(0, [1, 2]), S(0)), (P, P), (B, B), (S(0), S(1)),
    ]  # fmt: skip
    worse: list[str] = []
    for a, b in product(ends, repeat=2):
        source, target = Layout(ranks, grid, a, shape), Layout(ranks, grid, b, shape)
        best = fewest_cells(source, target, 4)
        if volume(route(source, target)) != best:
            worse.append(f"{a} -> {b}: {volume(route(source, target))}, not {best}")
    assert not worse
    source, target = (Layout((0, 1, 2), (3,), (S(0, n),), (9,)) for n in ([5, 0, 4], [3, 2, 4]))
    stages = [plan(source, target, rank, (0, 1, 2)).stages[0] for rank in range(3)]
    assert [[move.source.volume for move in stage.moves] for stage in stages] == [[3], [], [4]]
    assert [[(m.peer, m.volume) for m in stage.sends] for stage in stages] == [[(1, 2)], [], []]


def stages_of(a: Sbp, b: Sbp) -> list[Stage]:
    """Return the stages of rank 1 of 3."""
    members = (0, 1, 2)
    source, target = (Layout(members, (3,), (one,), (7, 6)) for one in (a, b))
    return list(plan(source, target, 1, members).stages)


def test_known_pairs_are_one_step() -> None:
    (stage,) = stages_of(P, B)
    assert [c.kind for c in stage.collectives] == ["all_reduce"] and not stage.sends
    (stage,) = stages_of(P, S(0))
    assert [m.volume for m in stage.sends] == [18, 12] and stage.destinations_overlap
    assert [m.volume for m in stage.receives] == [12, 12]
    (stage,) = stages_of(S(0), S(1))
    assert [m.volume for m in stage.sends] == [4, 4] and [m.volume for m in stage.receives] == [
        6,
        4,
    ]
    (stage,) = stages_of(S(0), B)
    assert [m.volume for m in stage.sends] == [12, 12]


@pytest.mark.parametrize(
    ("a", "b"), [(B, S(0)), (B, P), (S(1), P), (P, P), (B, B)], ids=lambda one: str(one)
)
def test_known_pairs_move_nothing(a: Sbp, b: Sbp) -> None:
    (stage,) = stages_of(a, b)
    assert not stage.communicates


def all_plans(source: Layout, target: Layout, size: int) -> list[Plan]:
    return [plan(source, target, rank, tuple(range(size))) for rank in range(size)]


@st.composite
def sbps(draw: st.DrawFn, grid: tuple[int, ...], shape: tuple[int, ...]) -> NdSbp:
    found: list[Sbp] = []
    for parts in grid:
        one = draw(st.sampled_from([B, P, *map(S, range(len(shape)))]))
        if one.is_split and all(one.dim != each.dim for each in found):
            one = S(one.dim, draw(cuts_in(shape[one.dim], parts)).sizes)
        found.append(one)
    return tuple(found)


@st.composite
def boxings(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    """Two layouts of one tensor, and the size of the world; often of the same workers."""
    shape, grids = draw(shapes()), st.sampled_from([(1,), (3,), (2, 2), (3, 2), (2, 2, 2)])
    grid = draw(grids)
    other = grid if draw(st.booleans()) else draw(grids)
    world = draw(st.integers(max(prod(grid), prod(other)), 9))
    ranks = draw(workers(prod(grid), world))
    others = ranks if grid == other and draw(st.booleans()) else draw(workers(prod(other), world))
    source = Layout(tuple(ranks), grid, draw(sbps(grid, shape)), shape)
    return source, Layout(tuple(others), other, draw(sbps(other, shape)), shape), world


def part_of(x: Array, layout: Layout, rank: int) -> Array | None:
    """The block of ``rank``; terms are random, and the first is what is missing."""
    index = layout.index(rank)
    if index is None:
        return None
    every = [range(n) if one == P else (0,) for one, n in zip(layout.sbp, layout.grid, strict=True)]
    terms = [np.random.default_rng(i).integers(1 << 40, size=x.shape) for i in every_index(every)]
    own = tuple(i if one == P else 0 for i, one in zip(index, layout.sbp, strict=True))
    number = every_index(every).index(own)
    term = terms[number] if number else x - sum(terms[1:], np.zeros_like(x))
    return term[layout.box(index).slices]


def every_index(ranges: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return list(product(*ranges))


def assert_parts(parts: PerRank, x: Array, layout: Layout) -> None:
    """All copies of each term are equal, and the first ones add up to ``x``."""
    whole, seen = np.zeros_like(x), {}
    for rank, part in enumerate(parts):
        index = layout.index(rank)
        assert (part is None) == (index is None)
        if index is not None:
            first = tuple(0 if one == B else i for i, one in zip(index, layout.sbp, strict=True))
            if first not in seen:
                whole[layout.box(index).slices] += part
            np.testing.assert_array_equal(seen.setdefault(first, part), part)
    np.testing.assert_array_equal(whole, x)


@exactly
@given(boxings())
def test_every_rank_gets_its_part(case: tuple[Layout, Layout, int]) -> None:
    """All copies are equal, there and back, and the volume is what the messages have."""
    source, target, size = case
    plans = all_plans(source, target, size)
    x = np.random.default_rng(1).integers(1 << 40, size=source.shape)
    for a, b, given_plans in (
        (source, target, plans),
        (target.dual, source.dual, [one.T for one in plans]),
    ):
        assert_parts(carry_out(given_plans, [part_of(x, a, rank) for rank in range(size)]), x, b)
    if sum(map(prod, (one.input_shape or (0,) for one in plans))) < 200:
        assert_linear_operator(plans)
    for number, step in enumerate(route(source, target)):
        if step.summed is None:
            sends = [message for one in plans for message in one.stages[number].sends]
            assert step.volume == sum(message.volume for message in sends)


MANY = (4096,), (64, 64), (16, 16, 16)


def many_pairs(grid: tuple[int, ...]) -> list[tuple[Layout, Layout]]:
    """Pairs of which each rank exchanges cells with at most 64 others."""
    shape, ranks = (8192, 4096, 64), tuple(range(prod(grid)))
    cut = [S(d) for d in range(len(grid))]
    uneven = S(0, [8192 // grid[0] - 1, *[8192 // grid[0]] * (grid[0] - 2), 8192 // grid[0] + 1])
    rest = cut[:-1]
    pairs: list[tuple[list[Sbp], list[Sbp]]] = [
        (cut, [uneven, *cut[1:]]), ([*rest, B], cut), ([*rest, B], [*rest, P]), (cut, [*rest, P]),
    ]  # fmt: skip
    if rest:
        pairs += [(cut, [*rest, B]), ([*rest, P], cut), (cut, [*cut[1:], cut[0]])]
        pairs += [([*rest, P], [*rest, B]), ([B, *cut[1:]], [S(0), *rest[1:], B])]
    found = [[Layout(ranks, grid, tuple(one), shape) for one in pair] for pair in pairs]
    others = tuple(rank + len(ranks) for rank in ranks)
    far = Layout(others, grid, (uneven, *cut[1:]), shape)
    return [(a, b) for a, b in found] + [(Layout(ranks, grid, tuple(cut), shape), far)]


@pytest.mark.parametrize("grid", MANY, ids=str)
def test_a_plan_of_many_ranks_visits_peers_only(
    grid: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boxes and blocks that are computed grow with the peers of a rank, not with the ranks."""
    visits = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def visit(*args: Any) -> Any:
            nonlocal visits
            visits += 1
            return function(*args)

        return visit

    for owner, name in (
        (boxes.Box, "__init__"), (blocks.Blocks, "block"), (layouts, "index_of"),
        (layouts, "rank_of"), (routes, "index_of"), (routes, "rank_of"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    for source, target in many_pairs(grid):
        members = tuple(sorted({*source.ranks, *target.ranks}))
        visits = 0
        (stage,) = plan(source, target, 1234, members).stages
        groups = sum(len(one.members) for one in stage.collectives)
        peers = len(stage.sends) + len(stage.receives) + groups
        assert peers <= 2 * 64 and visits <= 20 * (peers + 3), (source.sbp, target.sbp, visits)


def test_first_holders_share_the_work() -> None:
    """Copies that many ranks have are not all sent by the first."""
    source = Layout((0, 1, 2, 3), (4,), (B,), (8,))
    target = Layout((4, 5, 6, 7), (4,), (S(0),), (8,))
    stages = [plan(source, target, rank, tuple(range(8))).stages[0] for rank in range(4)]
    assert [[m.volume for m in stage.sends] for stage in stages] == [[2]] * 4


def test_a_search_spreads_messages() -> None:
    """Between grids of other shapes, two messages have two ends among four copies or terms."""
    copies, halves = Layout((0, 1, 2, 3), (4,), (B,), (8,)), Layout((4, 5), (2,), (S(0),), (8,))
    terms = copies.with_sbp((P,))
    sends = [len(one.stages[0].sends) for one in all_plans(copies, halves, 6)]
    receives = [len(one.stages[0].receives) for one in all_plans(halves, terms, 6)]
    assert sorted(sends[:4]) == sorted(receives[:4]) == [0, 0, 1, 1]


@pytest.mark.parametrize("shape", [(4,), (5,), (3, 2)], ids=str)
@pytest.mark.parametrize("grid", [(2,), (3,), (2, 2), (1, 4)], ids=str)
def test_peers_by_indices_are_as_busy_as_by_search(
    grid: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    ends = all_sbps(len(grid), len(shape))
    uneven = S(0, [shape[0], *[0] * (grid[-1] - 1)])
    ends += [(*one[:-1], uneven) for one in ends if all(each.dim != 0 for each in one[:-1])]
    ranks = tuple(range(prod(grid)))
    busier: list[str] = []
    for a, b, shift in product(ends, ends, (0, len(ranks))):
        others = tuple(rank + shift for rank in ranks)
        source, target = Layout(ranks, grid, a, shape), Layout(others, grid, b, shape)
        if routes.RouteStep(source, target).is_local:
            found = by_indices(source, target)
            if largest_load(found) > largest_load(routes._search_transfers(source, target)):
                busier.append(f"{a} -> {b} of ranks {others}")
    assert not busier


@pytest.mark.parametrize("shape", [(5,), (3, 2)], ids=str)
@pytest.mark.parametrize("grid", [(3,), (2, 2), (2, 1, 3)], ids=str)
def test_bounds_are_at_most_what_is_sent(grid: tuple[int, ...], shape: tuple[int, ...]) -> None:
    ends, ranks = all_sbps(len(grid), len(shape)), tuple(range(prod(grid)))
    is_exact = 0
    for a, b in product(ends, ends):
        source, target = Layout(ranks, grid, a, shape), Layout(ranks, grid, b, shape)
        step_cells = routes._cheapest_step(source, target).volume
        bounds = routes._fewest_sent(source, target), routes._least_sent(source, target)
        assert bounds[0] <= bounds[1] <= step_cells, f"{a} -> {b}"
        is_exact += bounds[1] == step_cells
        assert routes.least_volume(source, target) <= volume(route(source, target)), f"{a} -> {b}"
    assert is_exact > 0.9 * len(ends) ** 2


def largest_load(found: Sequence[tuple[int, int, boxes.Box]]) -> int:
    load = Counter[int]()
    for holder, receiver, cells in found:
        if holder != receiver:
            load[holder] += cells.volume
            load[receiver] += cells.volume
    return max(load.values(), default=0)


def by_indices(source: Layout, target: Layout) -> list[tuple[int, int, boxes.Box]]:
    return [
        (holder, rank, cells)
        for rank in target.ranks
        for holder, cells in routes._peers(target, target.index(rank) or (), source)
    ]


def test_blocks_of_blocks() -> None:
    """The outer axis splits first, the inner one each of its blocks."""
    layout = Layout((0, 1, 2, 3), (2, 2), (S(0), S(0)), (7,))
    assert [(layout.boxes[r].start[0], layout.boxes[r].stop[0]) for r in range(4)] == [
        (0, 2), (2, 4), (4, 6), (6, 7),
    ]  # fmt: skip
    layout = Layout((0, 1, 2, 3, 4, 5), (2, 3), (S(0), S(0)), (7,))
    assert [layout.boxes[r].stop[0] for r in range(6)] == [2, 3, 4, 5, 6, 7]


def test_shapes_must_agree() -> None:
    with pytest.raises(ShapeError, match=r"\[3\] cannot become one of shape \[4\]"):
        route(Layout((0,), (1,), (B,), (3,)), Layout((0,), (1,), (B,), (4,)))
