"""Find the cheapest route between two layouts of a global tensor, and each rank's plan for it.

A step is one set of messages. For each copy of the target, one of the ranks that hold a term of the
source sends it to one of the ranks that share the copy; nothing is sent if the two are one rank.
This moves the fewest bytes if there is one term or one copy. If several terms are needed in several
copies, they are summed first, each cell on one rank: through an intermediate layout, or by an
all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import NamedTuple

from gpudist.errors import ShapeError
from gpudist.geometry.boxes import (
    Box,
    Collective,
    Overlaps,
    Plan,
    Stage,
    intersection,
    stage_of,
)
from gpudist.geometry.cartesian import index_of
from gpudist.geometry.layout import Layout, Sbp, broadcast, misfit, partial_sum, split


class RouteTransfer(NamedTuple):
    """Cells that ``holder`` sends to ``receiver``; the two may be the same rank."""

    holder: int
    receiver: int
    cells: Box


class RouteStep(NamedTuple):
    """One set of messages.

    Attributes:
        source: layout before the step.
        target: layout after the step.
        summed: axes of an all-reduce, ``None`` if the step consists of transfers.
        volume: number of cells sent, over all ranks.
    """

    source: Layout
    target: Layout
    summed: tuple[int, ...] | None
    volume: int


@lru_cache(maxsize=4096)
def transfers(source: Layout, target: Layout) -> tuple[RouteTransfer, ...]:
    """Return the transfers of one step between all ranks, in the same order on every rank."""
    load: defaultdict[int, int] = defaultdict(int)
    found: list[RouteTransfer] = []
    blocks = source.groups("broadcast")
    terms, overlapping = list(blocks.values()), Overlaps(blocks)
    for wanted, copies in target.groups("partial_sum").items():
        for number, cells in overlapping(wanted):
            for holder, receiver in _pairs(terms[number], copies, load):
                if holder != receiver:
                    load[holder] += cells.volume
                    load[receiver] += cells.volume
                found.append(RouteTransfer(holder, receiver, cells))
    return tuple(found)


def _pairs(
    terms: list[list[int]], copies: list[list[int]], load: dict[int, int]
) -> list[tuple[int, int]]:
    """Choose the holder and the receiver of each term for each copy.

    A copy takes all its terms from one position among the ranks that hold them, and a term goes to
    the same position in all copies. This makes all copies equal, and in the adjoint all copies of
    gradients. Among these choices, the function prefers few messages, then a balanced load.

    Args:
        terms: ranks that have each term.
        copies: ranks whose values add up to each copy.
        load: cells sent and received by each rank so far.
    """
    position_of_term = [
        min(
            range(len(copies[0])),
            key=lambda m, term=term: sum(copy[m] not in term for copy in copies),
        )
        for term in terms
    ]
    starts = [position_of_term]
    if len(terms[0]) > 1:
        starts += [[m] * len(terms) for m in range(len(copies[0]))]
    found = [_improved(terms, copies, start, load) for start in starts]
    return min(found, key=lambda pairs: sum(holder != receiver for holder, receiver in pairs))


def _improved(
    terms: list[list[int]], copies: list[list[int]], positions: list[int], load: dict[int, int]
) -> list[tuple[int, int]]:
    """Improve the pairs by choosing sources and positions alternately.

    The result is optimal if either side has only one position to choose from.
    """

    def price(pairs: list[tuple[int, int]]) -> tuple[int, int]:
        messages = [pair for pair in pairs if pair[0] != pair[1]]
        return len(messages), sum(load[rank] for pair in messages for rank in pair)

    sources: list[int] = []
    for _ in range(2):
        sources = [
            min(
                range(len(terms[0])),
                key=lambda b, copy=copy: price(
                    [(term[b], copy[m]) for term, m in zip(terms, positions, strict=True)]
                ),
            )
            for copy in copies
        ]
        positions = [
            min(
                range(len(copies[0])),
                key=lambda m, term=term: price(
                    [(term[b], copy[m]) for copy, b in zip(copies, sources, strict=True)]
                ),
            )
            for term in terms
        ]
    return [
        (term[b], copy[m])
        for term, m in zip(terms, positions, strict=True)
        for copy, b in zip(copies, sources, strict=True)
    ]


@lru_cache(maxsize=4096)
def route(source: Layout, target: Layout) -> tuple[RouteStep, ...]:
    """Return the steps that move the fewest cells; among equals, the route with the fewest steps.

    Raises:
        ShapeError: on every rank alike, if the global shapes differ.
    """
    if source.shape != target.shape:
        raise ShapeError(
            f"boxing: a tensor of global shape {list(source.shape)} cannot become one of shape "
            f"{list(target.shape)}; the shapes must be equal"
        )
    ways: list[tuple[Layout, ...]] = [(source, target)]
    if source.count("partial_sum") > 1 and target.count("broadcast") > 1:
        ways += [(source, between, target) for between in dict.fromkeys(_between(source, target))]
    bounds = [sum(map(_fewest_sent, way, way[1:])) for way in ways]
    best: tuple[RouteStep, ...] = ()
    least: tuple[float, int] = inf, 0
    for bound, i in sorted(zip(bounds, range(len(ways)), strict=True)):
        if (bound, i) > least:
            break
        steps = tuple(map(_step, ways[i], ways[i][1:]))
        if (volume(steps), i) < least:
            best, least = steps, (volume(steps), i)
    return best


def least_volume(source: Layout, target: Layout) -> int:
    """Return a lower bound of the cells that a route moves, without searching for one."""
    terms, copies = source.count("partial_sum"), target.count("broadcast")
    if terms == 1 or copies == 1:
        return volume(route(source, target))
    if target.count("partial_sum") > 1:
        return 0
    return prod(source.shape) * (terms + copies - 2)


def volume(steps: tuple[RouteStep, ...]) -> int:
    """Return the number of cells sent, over all ranks and steps."""
    return sum(step.volume for step in steps)


def _step(source: Layout, target: Layout) -> RouteStep:
    """Return a step by transfers, or by an all-reduce if that moves no more cells."""
    if source.count("broadcast") > 1 and target.count("partial_sum") > 1:
        found = transfers(source, target)
        sent = sum(t.cells.volume for t in found if t.holder != t.receiver)
    else:  # Every rank keeps as many cells as it can.
        sent = _cells_needed(source, target) - _cells_kept(source, target)
    axes = _summed_axes(source, target)
    if axes and (reduced := _cells_all_reduced(source, axes)) <= sent:
        return RouteStep(source, target, axes, reduced)
    return RouteStep(source, target, None, sent)


def _fewest_sent(source: Layout, target: Layout) -> int:
    # A lower bound by counts alone: ranks keep at most the cells that they hold before, and at most
    # those that they hold after.
    sent = _cells_needed(source, target) - min(_cells_held(source), _cells_held(target))
    axes = _summed_axes(source, target)
    return min(sent, _cells_all_reduced(source, axes)) if axes else sent


def _cells_needed(source: Layout, target: Layout) -> int:
    return source.count("partial_sum") * target.count("broadcast") * prod(source.shape)


def _cells_held(layout: Layout) -> int:
    return layout.count("partial_sum") * layout.count("broadcast") * prod(layout.shape)


def _cells_kept(source: Layout, target: Layout) -> int:
    pairs = ((box, target.boxes.get(rank)) for rank, box in source.boxes.items())
    common = (intersection(box, other) for box, other in pairs if other is not None)
    return sum(cells.volume for cells in common if cells is not None)


def _cells_all_reduced(source: Layout, axes: tuple[int, ...]) -> int:
    size = prod(source.grid[axis] for axis in axes)
    return 2 * (size - 1) * _cells_held(source) // size


def _summed_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    if not source.same_workers(target):
        return ()
    pairs = list(zip(source.sbp, target.sbp, source.grid, strict=True))
    differ = [i for i, (a, b, n) in enumerate(pairs) if a != b and n > 1]
    fits = all(pairs[i][:2] == (partial_sum, broadcast) for i in differ)
    return tuple(differ) if fits else ()


def _between(source: Layout, target: Layout) -> Iterator[Layout]:
    """Return intermediate layouts without terms: mixtures of both, then each block on one rank."""
    shape = source.shape
    dims = {one.dim for one in (*source.sbp, *target.sbp) if one.is_split}
    if shape:
        dims.add(shape.index(max(shape)))
    kinds: list[Sbp] = [*(split(d) for d in sorted(dims)), broadcast, partial_sum]
    for end in (source, target):
        # An axis may also keep its own explicit cuts.
        own = [[*kinds, one] if one.sizes is not None else kinds for one in end.sbp]
        for sbp in product(*own):
            if not misfit(sbp, end.grid, shape):
                yield end.with_sbp(sbp)
    yield _gathered(source, target)
    yield _gathered(target, source)


def _gathered(layout: Layout, other: Layout) -> Layout:
    """Return ``layout`` with each block on the one rank that holds most of it in ``other``."""
    axes = [axis for axis, one in enumerate(layout.sbp) if one.is_split]
    chosen: dict[tuple[int, ...], tuple[int, int]] = {}
    for position, rank in enumerate(layout.ranks):
        index = index_of(position, layout.grid)
        key = tuple(index[axis] for axis in axes)
        common = other.boxes.get(rank)
        shared = intersection(layout.boxes[rank], common) if common is not None else None
        cells = shared.volume if shared is not None else 0
        if key not in chosen or cells > chosen[key][0]:
            chosen[key] = (cells, rank)
    ranks = tuple(rank for _, rank in chosen.values())
    grid = tuple(layout.grid[axis] for axis in axes) or (1,)
    return Layout(ranks, grid, tuple(layout.sbp[a] for a in axes) or (broadcast,), layout.shape)


def plan(source: Layout, target: Layout, rank: int, members: tuple[int, ...]) -> Plan:
    """Return the plan of ``rank`` for the cheapest route.

    Args:
        source, target: layouts.
        rank: rank of the world.
        members: ranks of the world in source and target; the plan addresses peers by position in
            this list.
    """
    position = {member: i for i, member in enumerate(members)}
    stages = [_stage(step, rank, position) for step in route(source, target)]
    return Plan(("boxing", source, target), position[rank], tuple(stages))


def _stage(step: RouteStep, rank: int, position: dict[int, int]) -> Stage:
    owned, wanted = step.source.boxes.get(rank), step.target.boxes.get(rank)
    input_shape = owned.shape if owned is not None else None
    output_shape = wanted.shape if wanted is not None else None
    if step.summed is not None:
        if owned is None or not owned.volume:
            return Stage(input_shape, output_shape)
        members = tuple(sorted(position[r] for r in _summed_with(step, rank)))
        reduce = Collective("all_reduce", members, members[0], True)
        return Stage(input_shape, output_shape, collectives=(reduce,))
    gives: list[tuple[int, Box]] = []
    takes: list[tuple[int, Box]] = []
    for holder, receiver, cells in transfers(step.source, step.target):
        if owned is not None and holder == rank:
            gives.append((position[receiver], cells.shifted(owned.start)))
        if wanted is not None and receiver == rank:
            takes.append((position[holder], cells.shifted(wanted.start)))
    return stage_of(
        position[rank],
        input_shape,
        output_shape,
        gives,
        takes,
        sources_overlap=step.target.count("broadcast") > 1,
        destinations_overlap=step.source.count("partial_sum") > 1,
    )


def _summed_with(step: RouteStep, rank: int) -> list[int]:
    """Return the ranks whose blocks are summed with the block of ``rank``."""
    grid, summed = step.source.grid, step.summed or ()
    mine = index_of(step.source.ranks.index(rank), grid)
    return [
        other
        for i, other in enumerate(step.source.ranks)
        if all(
            a == b or axis in summed
            for axis, (a, b) in enumerate(zip(index_of(i, grid), mine, strict=True))
        )
    ]
