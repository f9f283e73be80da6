"""Enumerate the Cartesian partitions of a tensor, with a quick estimate of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import product
from math import prod

from gpudist.convert.network_plan import NetworkPlan
from gpudist.geometry.cartesian import rank_of
from gpudist.planning.clock import Clock
from gpudist.planning.rehearsal import DryNetwork
from gpudist.transport.dry import Posted, Traffic

Grid = tuple[int, ...]


def grids(ranks: int, shape: Sequence[int], axes: Collection[int]) -> Iterator[Grid]:
    """Return every grid of ``ranks`` workers that cuts only ``axes`` into blocks with cells."""
    if not shape:
        if ranks == 1:
            yield ()
        return
    last = len(shape) - 1
    most = min(ranks, shape[-1]) if last in axes else 1
    for parts in range(1, most + 1):
        if ranks % parts == 0:
            for leading in grids(ranks // parts, shape[:-1], axes):
                yield (*leading, parts)


def estimate_s(dry: DryNetwork, grid: Grid) -> float:
    """Estimate a step's time from block sizes and neighbours, well enough to exclude most grids.

    The estimate adds the kernels of the largest block, with backward as twice the forward. For
    every layer with a kernel wider than one cell, it adds one exchange with all neighbours in
    forward and backward.
    """
    wide = Counter(layer for layer in dry.layers if layer[0] and len(layer[1]) == len(grid))
    exchanges_s = sum(
        times * _exchange_s(dry, grid, width, _largest(shape, grid))
        for (width, shape), times in wide.items()
    )
    return 3 * dry.sequential.compute_s * (imbalance(dry, grid) / prod(grid)) + 2 * exchanges_s


def _exchange_s(dry: DryNetwork, grid: Grid, width: int, block: Sequence[int]) -> float:
    """Time in which the middle rank swaps its faces, edges and corners, with a kernel a side."""
    middle = [parts // 2 for parts in grid]
    # No window reaches over the batch, so samples are never exchanged.
    steps = [[0]] + [
        [step for step in (-1, 0, 1) if 0 <= i + step < parts]
        for i, parts in zip(middle[1:], grid[1:], strict=True)
    ]
    posted: list[Posted] = []
    sides = 0
    for offset in product(*steps):
        if not any(offset):
            continue
        sides += sum(map(abs, offset)) == 1
        peer = rank_of([i + step for i, step in zip(middle, offset, strict=True)], grid)
        extents = [
            min(-(-width // 2), n) if step else n for n, step in zip(block, offset, strict=True)
        ]
        cells = prod(extents)
        posted.append(Posted(peer, cells * dry.itemsize, cells // max(1, extents[-1])))
    clock = Clock(dry.profile, rank_of(middle, grid))
    clock.exchange(Traffic(tuple(posted), tuple(posted)))
    return clock.phase.message_s + sides * dry.profile.kernel_us * 1e-6


def imbalance(dry: DryNetwork, grid: Grid) -> float:
    """Return the layer input cells of the first rank, which has the most, over the mean of all."""
    shapes = [shape for _, shape in dry.layers if len(shape) == len(grid)]
    whole = sum(map(prod, shapes))
    owned = sum(prod(_largest(shape, grid)) for shape in shapes)
    return owned * prod(grid) / whole if whole else 1.0


def representative_ranks(dry: DryNetwork, grid: Grid, plan: NetworkPlan | None = None) -> list[int]:
    """Return the ranks to rehearse: all up to 4, else a middle one, and the first if it is larger.

    The middle rank has the most neighbours. With a plan, the first rank, the middle ranks of the
    grids of all layouts and the ranks with the largest of uneven blocks are rehearsed.
    """
    size = prod(grid)
    if size <= 4:
        return list(range(size))
    middle = rank_of([parts // 2 for parts in grid], grid)
    if plan is None:
        return [middle] if imbalance(dry, grid) == 1 else [0, middle]
    busiest = {0, middle}
    for pin in plan.layouts:
        shape = pin.grid or grid
        sbp = pin.sbp if len(pin.sbp) == len(shape) else pin.sbp * len(shape)
        index = [
            parts // 2 if attribute.sizes is None else attribute.sizes.index(max(attribute.sizes))
            for parts, attribute in zip(shape, sbp, strict=True)
        ]
        busiest.add(rank_of(index, shape))
    return sorted(busiest)


def _largest(shape: Sequence[int], grid: Grid) -> list[int]:
    return [-(-n // parts) for n, parts in zip(shape, grid, strict=True)]
