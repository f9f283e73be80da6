"""Whether a layout has a rank without cells, against all blocks of drawn layouts."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod

from gpudist.geometry.layout import Layout, Sbp, broadcast, split


def drawn(draw: random.Random) -> Layout:
    grid = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 3)))
    shape = tuple(draw.choice((0, draw.randint(1, 30), 30)) for _ in range(draw.randint(1, 3)))
    left, sbp = list(shape), list[Sbp]()
    for parts in grid:
        dim = draw.randrange(len(shape))
        sizes = None
        # Explicit sizes of the first axis that splits the dim.
        if draw.random() < 0.3 and all(one.dim != dim for one in sbp):
            cuts = sorted(draw.randint(0, left[dim]) for _ in range(parts - 1))
            ends = (0, *cuts, left[dim])
            sizes = tuple(b - a for a, b in pairwise(ends))
        sbp.append(split(dim, sizes) if draw.random() < 0.8 else broadcast)
    return Layout(tuple(range(prod(grid))), grid, tuple(sbp), shape)


def test_ranks_without_cells() -> None:
    draw, found = random.Random(0), [0, 0]
    for _ in range(2000):
        layout = drawn(draw)
        expected = any(not box.volume for box in layout.boxes.values())
        assert layout.has_empty_blocks == expected, layout
        found[expected] += 1
    assert min(found) > 200
