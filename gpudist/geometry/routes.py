"""Find the cheapest route between two layouts of a global tensor, and each rank's plan for it.

A step is one set of messages. For each copy of the target, one of the ranks that hold a term of the
source sends it to one of the ranks that share the copy; nothing is sent if the two are one rank.
This moves the fewest bytes if there is one term or one copy. If several terms are needed in several
copies, they are summed first, each cell on one rank: through an intermediate layout, or by an
all-reduce.

A rank computes its own transfers, in time proportional to its peers, wherever a rule by indices
balances the messages as well as a search over all ranks (``RouteStep.is_local``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf, prod
from typing import Any

import numpy as np

from gpudist.errors import ShapeError
from gpudist.geometry.boxes import Box, Collective, Plan, Stage, intersection, stage_of
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.geometry.layout import Index, Layout, Sbp, broadcast, misfit, partial_sum, split


@dataclass(frozen=True)
class RouteStep:
    """One set of messages.

    Attributes:
        source: layout before the step.
        target: layout after the step.
        summed: axes of an all-reduce, ``None`` if the step consists of transfers.
    """

    source: Layout
    target: Layout
    summed: tuple[int, ...] | None = None

    @cached_property
    def volume(self) -> int:
        """Number of cells sent, over all ranks."""
        source, target = self.source, self.target
        if self.summed is not None:
            return _cells_all_reduced(source, self.summed)
        if not self.is_local and source.count("broadcast") > 1 and target.count("partial_sum") > 1:
            transfers = _search_transfers(source, target)
            return sum(cells.volume for holder, receiver, cells in transfers if holder != receiver)
        # Every rank keeps as many cells as it can.
        return _cells_needed(source, target) - _cells_kept(source, target)

    @cached_property
    def is_local(self) -> bool:
        """Whether each rank finds its own transfers by ``_peers``.

        This is so if a term has one holder and a copy one receiver; or if both layouts are on grids
        of one shape, of the same ranks or of no common rank, and either nothing moves, or all
        holders of a block send and receive equally much.
        """
        source, target = self.source, self.target
        if source.count("broadcast") == target.count("partial_sum") == 1:
            return True
        if source.grid != target.grid:
            return False
        if source.ranks == target.ranks:
            if _cells_needed(source, target) == _cells_kept(source, target):
                return True
        elif not set(source.ranks).isdisjoint(target.ranks):
            return False
        return all(
            n == 1
            or a == b
            or (a != broadcast and b != partial_sum)
            or _is_alike(source, target, axis)
            for axis, (a, b, n) in enumerate(zip(source.sbp, target.sbp, source.grid, strict=True))
        )


def _is_alike(source: Layout, target: Layout, axis: int) -> bool:
    """Return whether one layout cuts a dim on ``axis``, in equal blocks, and the other does not."""
    cut, other = (target, source) if target.sbp[axis].is_split else (source, target)
    dim = cut.sbp[axis].dim
    axes = [
        (attribute, n)
        for attribute, n in zip(cut.sbp, cut.grid, strict=True)
        if attribute.dim == dim
    ]
    return (
        dim >= 0
        and all(attribute.dim != dim for attribute in other.sbp)
        and all(attribute.sizes is None for attribute, _ in axes)
        and cut.shape[dim] % prod(n for _, n in axes) == 0
    )


def _peers(own: Layout, index: Index, other: Layout) -> Iterator[tuple[int, Box]]:
    """Yield the holder and the cells of each transfer to the rank at ``index`` of ``own``.

    A holder and its receiver have the same index along axes where the holders have copies, and
    along axes where the receivers' values are added up. Then a rank sends nothing that the receiver
    has, and all copies are equal, as in ``_pairs``.

    In the dual layouts, these are the receivers of the rank at ``index`` of ``own``.

    Args:
        own: target of a step, or dual of its source.
        index: index of a rank on the grid of ``own``.
        other: source of the step, or dual of its target.
    """
    box, pinned = own.box(index), dict[int, int]()
    axes = zip(own.sbp, other.sbp, strict=True) if own.grid == other.grid else ()
    for axis, ends in enumerate(axes):
        # Where copies become terms, the first rank takes part.
        if ends == (partial_sum, broadcast) and index[axis]:
            return
        if ends[0] == partial_sum or ends[1] == broadcast:
            pinned[axis] = index[axis]
    if not box.volume:
        return
    for indices, cells in other.overlapping(box, pinned):
        fixed = {**pinned, **indices}
        ways = [(fixed[a],) if a in fixed else range(n) for a, n in enumerate(other.grid)]
        for place in product(*ways):
            yield other.ranks[rank_of(place, other.grid)], cells


@lru_cache(maxsize=4096)
def _search_transfers(source: Layout, target: Layout) -> tuple[tuple[int, int, Box], ...]:
    """Return holder, receiver and cells of all transfers, chosen with all ranks in view.

    They are in the same order on every rank; a holder may be its own receiver.
    """
    load: defaultdict[int, int] = defaultdict(int)
    transfers: list[tuple[int, int, Box]] = []
    blocks = source.groups("broadcast")
    numbers = {block: number for number, block in enumerate(blocks)}
    for wanted, copies in target.groups("partial_sum").items():
        common: dict[Box, Box] = {}
        for indices, cells in source.overlapping(wanted, {}):
            index = tuple(indices.get(axis, 0) for axis in range(len(source.grid)))
            common[source.box(index)] = cells
        for block in sorted(common, key=numbers.__getitem__):
            volume = common[block].volume
            for holder, receiver in _pairs(blocks[block], copies, load):
                if holder != receiver:
                    load[holder] += volume
                    load[receiver] += volume
                transfers.append((holder, receiver, common[block]))
    return tuple(transfers)


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
    choices = [_improve(terms, copies, start, load) for start in starts]
    return min(choices, key=lambda pairs: sum(holder != receiver for holder, receiver in pairs))


def _improve(
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
    direct = _cheapest_step(source, target)
    terms, copies = source.count("partial_sum"), target.count("broadcast")
    if 1 in (terms, copies) or direct.volume <= least_volume(source, target):
        return (direct,)
    ways = [(source, target)]
    ways += [(source, between, target) for between in dict.fromkeys(_between(source, target))]
    # Bounds of ways, of which the closer ones are computed for ways that are still among the best.
    bounds = [(sum(map(_fewest_sent, way, way[1:])), i, False) for i, way in enumerate(ways)]
    heapify(bounds)
    best: tuple[RouteStep, ...] = ()
    least: tuple[float, int] = inf, 0
    while bounds and bounds[0][:2] <= least:
        _, i, is_close = heappop(bounds)
        if not is_close:
            heappush(bounds, (sum(map(_least_sent, ways[i], ways[i][1:])), i, True))
            continue
        steps = tuple(map(_cheapest_step, ways[i], ways[i][1:]))
        if (volume(steps), i) < least:
            best, least = steps, (volume(steps), i)
    return best


def least_volume(source: Layout, target: Layout) -> int:
    """Return a lower bound of the cells that a route moves, without searching for one."""
    terms, copies = source.count("partial_sum"), target.count("broadcast")
    if terms == 1 or copies == 1:
        return _least_sent(source, target)
    if target.count("partial_sum") > 1:
        return 0
    return prod(source.shape) * (terms + copies - 2)


def volume(steps: tuple[RouteStep, ...]) -> int:
    """Return the number of cells sent, over all ranks and steps."""
    return sum(step.volume for step in steps)


def _cheapest_step(source: Layout, target: Layout) -> RouteStep:
    step, axes = RouteStep(source, target), _summed_axes(source, target)
    # An all-reduce has fewer messages than transfers.
    if axes and _cells_all_reduced(source, axes) <= step.volume:
        return RouteStep(source, target, axes)
    return step


def _fewest_sent(source: Layout, target: Layout) -> int:
    # A lower bound by counts alone: ranks keep at most the cells that they hold before, and at most
    # those that they hold after.
    return _less_if_summed(source, target, min(_cells_held(source), _cells_held(target)))


def _least_sent(source: Layout, target: Layout) -> int:
    # A lower bound, which is seldom too small: it does not search who sends.
    return _less_if_summed(source, target, _cells_kept(source, target))


def _less_if_summed(source: Layout, target: Layout, kept: int) -> int:
    sent, axes = _cells_needed(source, target) - kept, _summed_axes(source, target)
    return min(sent, _cells_all_reduced(source, axes)) if axes else sent


def _cells_needed(source: Layout, target: Layout) -> int:
    return source.count("partial_sum") * target.count("broadcast") * prod(source.shape)


def _cells_held(layout: Layout) -> int:
    return layout.count("partial_sum") * layout.count("broadcast") * prod(layout.shape)


@lru_cache(maxsize=4096)
def _cells_kept(source: Layout, target: Layout) -> int:
    """Return the cells that can stay on their rank, over all ranks.

    The dims of a group are cut by the same axes, so that the sum over the ranks is a product over
    groups.
    """
    if not source.same_workers(target):
        common = set(source.ranks).intersection(target.ranks)
        return sum(_common(source.boxes[rank], target.boxes[rank]) for rank in common)
    groups: list[tuple[set[int], list[int]]] = []
    ends = list(zip(source.sbp, target.sbp, strict=True))
    for dim in range(len(source.shape)):
        axes = {axis for axis, pair in enumerate(ends) if dim in (pair[0].dim, pair[1].dim)}
        linked = [group for group in groups if group[0] & axes]
        groups = [group for group in groups if group not in linked]
        axes, dims = axes.union(*(group[0] for group in linked)), [dim]
        groups.append((axes, sum((group[1] for group in linked), dims)))
    free = [i for i, pair in enumerate(ends) if not pair[0].is_split and not pair[1].is_split]
    # Where copies become terms, one rank keeps what all have.
    kept = prod(source.grid[i] for i in free if ends[i] != (broadcast, partial_sum))
    for axes, dims in groups:
        a, b = (layout.restrict(sorted(axes), sorted(dims)) for layout in (source, target))
        apart = not any(x.is_split and y.is_split for x, y in zip(a.sbp, b.sbp, strict=True))
        if a.sbp == b.sbp or (len(dims) == 1 and apart):
            kept *= prod(a.shape)
        else:
            kept *= _cells_in_common(a, b)
    return kept


# Cells of a rank in both layouts, added over a grid, all of whose axes cut. Arrays and a cache,
# since a derivation for 64 workers asks thousands of times, often of the same layouts.
@lru_cache(maxsize=4096)
def _cells_in_common(a: Layout, b: Layout) -> int:
    cells: Any = 1
    for dim in range(len(a.shape)):
        (start, stop), (other_start, other_stop) = _ranges(a, dim), _ranges(b, dim)
        common = np.minimum(stop, other_stop) - np.maximum(start, other_start)
        cells = cells * np.maximum(common, 0)
    return int(np.sum(cells))


def _ranges(layout: Layout, dim: int) -> tuple[Any, Any]:
    """Return start and stop of the cells of each rank along ``dim``, as arrays over the grid."""
    start: Any = 0
    extent: Any = layout.shape[dim]
    for axis, (one, parts) in enumerate(zip(layout.sbp, layout.grid, strict=True)):
        if one.dim != dim:
            continue
        index: Any = np.arange(parts)
        index = index.reshape(-1, *[1] * (len(layout.grid) - 1 - axis))
        if one.sizes is None:
            size, larger = np.divmod(extent, parts)
            start = start + index * size + np.minimum(index, larger)
            extent = size + (index < larger)
        else:
            extent = np.reshape(one.sizes, index.shape)
            start = start + np.reshape(np.cumsum(one.sizes), index.shape) - extent
    return start, start + extent


def _common(box: Box, other: Box) -> int:
    common = intersection(box, other)
    return 0 if common is None else common.volume


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
    dims = {attribute.dim for attribute in (*source.sbp, *target.sbp) if attribute.is_split}
    if shape:
        dims.add(shape.index(max(shape)))
    kinds: list[Sbp] = [*(split(d) for d in sorted(dims)), broadcast, partial_sum]
    for end in (source, target):
        # An axis may also keep its own explicit cuts.
        choices = [
            [*kinds, attribute] if attribute.sizes is not None else kinds for attribute in end.sbp
        ]
        for sbp in product(*choices):
            if not misfit(sbp, end.grid, shape):
                yield end.with_sbp(sbp)
    yield _gather_copies(source, target)
    yield _gather_copies(target, source)


def _gather_copies(layout: Layout, other: Layout) -> Layout:
    """Return ``layout`` with each block on the one rank that holds most of it in ``other``."""
    axes = [axis for axis, attribute in enumerate(layout.sbp) if attribute.is_split]
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
        members: ranks of the world in source and target, ascending; the plan addresses peers by
            position in this list.
    """
    stages = [_stage(step, rank, members) for step in route(source, target)]
    return Plan(("boxing", source, target), bisect_left(members, rank), tuple(stages))


def _stage(step: RouteStep, rank: int, members: tuple[int, ...]) -> Stage:
    source, target = step.source, step.target
    here, there = source.index(rank), target.index(rank)
    owned = None if here is None else source.box(here)
    wanted = None if there is None else target.box(there)
    input_shape = owned.shape if owned is not None else None
    output_shape = wanted.shape if wanted is not None else None
    if step.summed is not None:
        if here is None or owned is None or not owned.volume:
            return Stage(input_shape, output_shape)
        summed = [range(n) if a in step.summed else (here[a],) for a, n in enumerate(source.grid)]
        ranks = [source.ranks[rank_of(index, source.grid)] for index in product(*summed)]
        group = tuple(bisect_left(members, each) for each in sorted(ranks))
        reduce = Collective("all_reduce", group, group[0], True)
        return Stage(input_shape, output_shape, collectives=(reduce,))
    if step.is_local:
        sent = () if here is None else _peers(source.dual, here, target.dual)
        received = () if there is None else _peers(target, there, source)
    else:
        transfers = _search_transfers(source, target)
        sent = [(receiver, cells) for holder, receiver, cells in transfers if holder == rank]
        received = [(holder, cells) for holder, receiver, cells in transfers if receiver == rank]
    gives = [
        (bisect_left(members, peer), cells.relative_to(owned.start))
        for peer, cells in sent
        if owned is not None
    ]
    takes = [
        (bisect_left(members, peer), cells.relative_to(wanted.start))
        for peer, cells in received
        if wanted is not None
    ]
    return stage_of(
        bisect_left(members, rank),
        input_shape,
        output_shape,
        gives,
        takes,
        sources_overlap=target.count("broadcast") > 1,
        destinations_overlap=source.count("partial_sum") > 1,
    )
