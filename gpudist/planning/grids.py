"""All Cartesian partitions of a tensor, and a quick estimate of each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod

from gpudist.planning.rehearsal import Stage

Grid = tuple[int, ...]


def grids(ranks: int, shape: Sequence[int], axes: Collection[int]) -> Iterator[Grid]:
    """Every grid of ``ranks`` workers that cuts dims of ``axes`` alone, no finer than by cells."""
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


def estimate_s(stage: Stage, grid: Grid) -> float:
    """A step's time from block sizes and faces alone: good enough to leave most grids out.

    The kernels of the largest block, backward taken as twice the forward; and of every layer with a
    kernel wider than a cell one exchange with all neighbours in each direction.
    """
    profile = stage.profile
    link = profile.node if prod(grid) <= profile.ranks_per_node else profile.network
    neighbours = prod(min(parts, 3) for parts in grid) - 1
    latency_s = (link.latency_us + max(0, neighbours - 1) * link.message_us) * 1e-6
    messages_s = 0.0
    cut = [d for d, parts in enumerate(grid) if parts > 1]
    for width, shape in stage.layers:
        if width and cut and len(shape) == len(grid):
            block = _largest(shape, grid)
            cells = sum(min(width, block[d]) * prod(block) // block[d] for d in cut)
            messages_s += 2 * (latency_s + cells * stage.itemsize / link.bytes_per_s)
    share = imbalance(stage, grid) / prod(grid)
    return 3 * stage.sequential.compute_s * share + messages_s


def imbalance(stage: Stage, grid: Grid) -> float:
    """Cells that the first rank, which has most, gives to layers, over the mean of all ranks."""
    shapes = [shape for _, shape in stage.layers if len(shape) == len(grid)]
    whole = sum(map(prod, shapes))
    owned = sum(prod(_largest(shape, grid)) for shape in shapes)
    return owned * prod(grid) / whole if whole else 1.0


def spread_ranks(stage: Stage, grid: Grid) -> list[int]:
    """Of a few workers all; of many one amid others, and the first, where its blocks are larger.

    The one in the middle has the most neighbours.
    """
    size = prod(grid)
    if size <= 4:
        return list(range(size))
    middle = 0
    for parts in grid:
        middle = middle * parts + parts // 2
    return [middle] if imbalance(stage, grid) == 1 else [0, middle]


def _largest(shape: Sequence[int], grid: Grid) -> list[int]:
    return [-(-n // parts) for n, parts in zip(shape, grid, strict=True)]
