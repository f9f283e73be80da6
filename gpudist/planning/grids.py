"""Enumerate the Cartesian partitions of a tensor, with a quick estimate of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

from gpudist.planning.rehearsal import DryNetwork

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
    """Estimate a step's time from block sizes and faces, well enough to exclude most grids.

    The estimate adds the kernels of the largest block, with backward as twice the forward. For
    every layer with a kernel wider than one cell, it adds one exchange with all neighbours in
    forward and backward.
    """
    profile = dry.profile
    link = profile.node if prod(grid) <= profile.ranks_per_node else profile.network
    neighbours = prod(min(parts, 3) for parts in grid) - 1
    latency_s = (link.latency_us + max(0, neighbours - 1) * link.message_us) * 1e-6
    messages_s = 0.0
    cut = [d for d, parts in enumerate(grid) if parts > 1]
    for width, shape in dry.layers:
        if width and cut and len(shape) == len(grid):
            block = _largest(shape, grid)
            cells = sum(min(width, block[d]) * prod(block) // block[d] for d in cut)
            messages_s += 2 * (latency_s + cells * dry.itemsize / link.bytes_per_s)
    share = imbalance(dry, grid) / prod(grid)
    return 3 * dry.sequential.compute_s * share + messages_s


def imbalance(dry: DryNetwork, grid: Grid) -> float:
    """Return the layer input cells of the first rank, which has the most, over the mean of all."""
    shapes = [shape for _, shape in dry.layers if len(shape) == len(grid)]
    whole = sum(map(prod, shapes))
    owned = sum(prod(_largest(shape, grid)) for shape in shapes)
    return owned * prod(grid) / whole if whole else 1.0


def representative_ranks(dry: DryNetwork, grid: Grid) -> list[int]:
    """Return the ranks to rehearse: all up to 4, else a middle one, and the first if it is larger.

    The middle rank has the most neighbours.
    """
    size = prod(grid)
    if size <= 4:
        return list(range(size))
    middle = 0
    for parts in grid:
        middle = middle * parts + parts // 2
    return [middle] if imbalance(dry, grid) == 1 else [0, middle]


def _largest(shape: Sequence[int], grid: Grid) -> list[int]:
    return [-(-n // parts) for n, parts in zip(shape, grid, strict=True)]
