"""The cheapest way from one layout of a global tensor to another, and its plan on a rank.

A step is one set of messages: each term of the source goes, for each copy of the target, from one
of the ranks that have it to one of the ranks that share the copy, and stays where it is if a rank
is both. That is the fewest bytes if there is one term or one copy. Sums of several terms that are
wanted several times are added up first, each cell on one rank: through a layout between the two, or
by an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from gpudist.errors import ShapeError
from gpudist.geometry.boxes import (
    Box,
    Collective,
    Move,
    Plan,
    Stage,
    intersection,
    messages_by_peer,
)
from gpudist.geometry.cartesian import index_of
from gpudist.sbp.attributes import Sbp, broadcast, misfit, partial_sum, split
from gpudist.sbp.layout import Layout


class Transfer(NamedTuple):
    """Cells that ``holder`` gives to ``receiver``, which may be itself."""

    holder: int
    receiver: int
    cells: Box


class Step(NamedTuple):
    """One set of messages.

    Attributes:
        summed: the axes of an all-reduce, ``None`` if the step is made of transfers.
        volume: cells that travel, over all ranks.
    """

    source: Layout
    target: Layout
    summed: tuple[int, ...] | None
    volume: int


@lru_cache(maxsize=4096)
def transfers(source: Layout, target: Layout) -> tuple[Transfer, ...]:
    """What each rank gives to each other in one step, in an order that all ranks share."""
    load: defaultdict[int, int] = defaultdict(int)
    found: list[Transfer] = []
    terms = source.groups("broadcast")
    for wanted, copies in target.groups("partial_sum").items():
        for owned, holders_of_terms in terms.items():
            cells = intersection(owned, wanted)
            if cells is None:
                continue
            for holder, receiver in _pairs(holders_of_terms, copies, load):
                if holder != receiver:
                    load[holder] += cells.volume
                    load[receiver] += cells.volume
                found.append(Transfer(holder, receiver, cells))
    return tuple(found)


def _pairs(
    terms: list[list[int]], copies: list[list[int]], load: dict[int, int]
) -> list[tuple[int, int]]:
    """Who gives each term to whom, for each copy.

    A copy takes all its terms from one position among the ranks that have them, and a term goes to
    one position in all copies: so copies are alike, and in the adjoint those of gradients are.
    Among all such choices, one with few messages, then one that shares them out.

    Args:
        terms: for each term, the ranks that have it.
        copies: for each copy, the ranks whose values add up to it.
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
    """The pairs, from where each term goes first: the best of one choice for the other, in turns.

    Exact if there is one position to choose from on either side.
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
def route(source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps that move the fewest cells, fewer steps before more.

    Raises:
        ShapeError: on every rank alike, if the global shapes differ.
    """
    if source.shape != target.shape:
        raise ShapeError(
            f"a tensor of global shape {list(source.shape)} cannot become one of shape "
            f"{list(target.shape)}"
        )
    best = (_step(source, target),)
    if source.count("partial_sum") == 1 or target.count("broadcast") == 1:
        return best
    for between in _between(source, target):
        first = _step(source, between)
        if first.volume < volume(best):
            steps = (first, _step(between, target))
            best = min(best, steps, key=volume)
    return best


def least_volume(source: Layout, target: Layout) -> int:
    """A number of cells below which no route is, found without a search."""
    terms, copies = source.count("partial_sum"), target.count("broadcast")
    if terms == 1 or copies == 1:
        return volume(route(source, target))
    if target.count("partial_sum") > 1:
        return 0
    return prod(source.shape) * (terms + copies - 2)


def volume(steps: tuple[Step, ...]) -> int:
    """Cells that travel, over all ranks and steps."""
    return sum(step.volume for step in steps)


def _step(source: Layout, target: Layout) -> Step:
    """By transfers, or by an all-reduce if that moves no more."""
    given = transfers(source, target)
    direct = sum(t.cells.volume for t in given if t.holder != t.receiver)
    axes = _summed_axes(source, target)
    if axes:
        size = prod(source.grid[axis] for axis in axes)
        cells = sum(box.volume for box in source.boxes.values())
        reduced = 2 * (size - 1) * cells // size
        if reduced <= direct:
            return Step(source, target, axes, reduced)
    return Step(source, target, None, direct)


def _summed_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes of the all-reduce from source to target, none if there is no such."""
    if not source.same_workers(target):
        return ()
    pairs = list(zip(source.sbp, target.sbp, source.grid, strict=True))
    differ = [i for i, (a, b, n) in enumerate(pairs) if a != b and n > 1]
    fits = all(pairs[i][:2] == (partial_sum, broadcast) for i in differ)
    return tuple(differ) if fits else ()


def _between(source: Layout, target: Layout) -> Iterator[Layout]:
    """Layouts in which sums may be complete: every mixture, then each block on one rank."""
    shape = source.shape
    dims = {one.dim for one in (*source.sbp, *target.sbp) if one.is_split}
    if shape:
        dims.add(shape.index(max(shape)))
    kinds: list[Sbp] = [*(split(d) for d in sorted(dims)), broadcast, partial_sum]
    for end in (source, target):
        # An axis has its own explicit cuts besides.
        own = [[*kinds, one] if one.sizes is not None else kinds for one in end.sbp]
        for sbp in product(*own):
            if not misfit(sbp, end.grid, shape):
                yield Layout(end.ranks, end.grid, sbp, shape)
    yield _gathered(source, target)
    yield _gathered(target, source)


def _gathered(layout: Layout, other: Layout) -> Layout:
    """Each block of ``layout`` on one of its ranks: that which has most of its cells in ``other``
    too."""
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
    """The part of the rank of the world ``rank`` in the cheapest way.

    Args:
        members: ranks of the world of source and target; messages name positions in it.
    """
    position = {member: i for i, member in enumerate(members)}
    stages = [_stage(step, rank, position) for step in route(source, target)]
    return Plan(("boxing", source, target), position[rank], tuple(stages))


def _stage(step: Step, rank: int, position: dict[int, int]) -> Stage:
    owned, wanted = step.source.boxes.get(rank), step.target.boxes.get(rank)
    input_shape = owned.shape if owned is not None else None
    output_shape = wanted.shape if wanted is not None else None
    if step.summed is not None:
        if owned is None or not owned.volume:
            return Stage(input_shape, output_shape)
        members = tuple(sorted(position[r] for r in _summed_with(step, rank)))
        reduce = Collective("all_reduce", members, members[0], True)
        return Stage(input_shape, output_shape, collectives=(reduce,))
    moves: list[Move] = []
    sends: list[tuple[int, Box]] = []
    receives: list[tuple[int, Box]] = []
    for holder, receiver, cells in transfers(step.source, step.target):
        if owned is not None and wanted is not None and holder == receiver == rank:
            moves.append(Move(cells.shifted(owned.start), cells.shifted(wanted.start)))
        elif owned is not None and holder == rank:
            sends.append((position[receiver], cells.shifted(owned.start)))
        elif wanted is not None and receiver == rank:
            receives.append((position[holder], cells.shifted(wanted.start)))
    return Stage(
        input_shape,
        output_shape,
        tuple(moves),
        messages_by_peer(sends),
        messages_by_peer(receives),
        sources_overlap=step.target.count("broadcast") > 1,
        destinations_overlap=step.source.count("partial_sum") > 1,
    )


def _summed_with(step: Step, rank: int) -> list[int]:
    """The ranks whose blocks are summed with that of ``rank``."""
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
