"""Random choices that the families share: a grid, its workers, uneven blocks, a dtype."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import grid


def draw_grid(rng: random.Random, dim: int, axes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return a grid of at most ``ranks`` workers that is split along some of ``axes``."""
    shape = [1] * dim
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        axis = rng.choice(axes)
        free = ranks // (prod(shape) // shape[axis])
        shape[axis] = rng.randint(1, free)
    return tuple(shape)


def draw_sizes(
    rng: random.Random, shape: Sequence[int], grid: Sequence[int], dims: Sequence[int]
) -> dict[int, tuple[int, ...]]:
    """Uneven blocks, some of them empty, along some of the split ``dims``."""
    sizes: dict[int, tuple[int, ...]] = {}
    for d in dims:
        if grid[d] == 1 or rng.random() < 0.7:
            continue
        cuts = sorted(rng.randint(0, shape[d]) for _ in range(grid[d] - 1))
        sizes[d] = tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape[d]], strict=True))
    return sizes


def draw_dtype(rng: random.Random) -> str:
    return rng.choices(["float64", "float32", "bfloat16"], [8, 1, 1])[0]


def scattered(P_world: Partition, shape: Sequence[int], seed: int) -> CartesianPartition:
    """A grid on the first ranks of the world, in order, or with a seed on any, in any order."""
    ranks = list(range(P_world.size))
    if seed:
        random.Random(seed).shuffle(ranks)
    return grid(P_world, shape, ranks[: prod(shape)])
