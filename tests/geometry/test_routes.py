"""Routes move as few cells as an exhaustive search over sequences of messages finds.

Each cell travels on its own, so the fewest messages per cell, summed over the cells, is the fewest
of the tensor.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from gpudist.errors import ShapeError
from gpudist.geometry.boxes import Stage
from gpudist.geometry.layout import Layout, NdSbp, Sbp, broadcast, partial_sum, split
from gpudist.geometry.routes import plan, route, transfers, volume

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
    assert [(t.holder, t.receiver, t.cells.volume) for t in transfers(source, target)] == [
        (0, 0, 3), (0, 1, 2), (2, 2, 4),
    ]  # fmt: skip


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


def test_first_holders_share_the_work() -> None:
    """Copies that many ranks have are not all sent by the first."""
    source = Layout((0, 1, 2, 3), (4,), (B,), (8,))
    target = Layout((4, 5, 6, 7), (4,), (S(0),), (8,))
    senders = {t.holder for t in transfers(source, target)}
    assert senders == {0, 1, 2, 3}


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
