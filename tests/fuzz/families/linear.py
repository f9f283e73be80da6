"""The linear layer: leading dims split on ``P_x`` alone, or features too, over three partitions."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import TOLERANCE, Case
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import Slices, assert_same_as_sequential, own_slices, random_like_all
from tests.nn.placing import Placing, draw_placing

LAYERS = ("Linear",)


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    leading = random.randint(1, 3)
    shape = tuple(random.randint(1, 6) for _ in range(leading + 1))
    options = {"out_features": random.randint(1, 8), "bias": random.random() < 0.7}
    if random.random() < 0.5:
        grid = draw_grid(random, leading + 1, range(leading), ranks)
        extra = {}
    else:
        outputs = random.randint(1, min(ranks, 3))
        # The number of workers that multiply is that of the input times these blocks.
        grid = draw_grid(random, leading + 1, range(leading + 1), ranks // outputs)
        extra = {"outputs": outputs}
    sizes = draw_sizes(random, shape, grid, range(leading))
    dtype, seed = draw_dtype(random), random.randint(0, 99)
    return Case(layer, grid, shape, options, sizes, dtype, seed, extra | draw_placing(random))


def check(case: Case, P_world: Partition) -> None:
    dtype = getattr(torch, case.dtype)
    options = {"in_features": case.shape[-1], **case.options, "dtype": dtype}
    P_x = scattered(P_world, case.grid, case.seed)
    P_y, P_w = P_x, scattered(P_world, (1, 1), case.seed)
    others: Any = ()
    if case.grid[-1] > 1 or "outputs" in case.extra:
        outputs = case.extra.get("outputs", case.grid[-1])
        seed = case.seed + 1 if case.seed else 0
        P_y = scattered(P_world, (*case.grid[:-1], outputs), seed)
        P_w = scattered(P_world, (*case.grid[:-1], outputs, case.grid[-1]), case.seed)
        others = P_y, P_w
    placing = Placing(case.extra, lambda name, shape: _owned(P_w, name, shape))

    def distributed() -> torch.nn.Module:
        return placing.around(nn.DistributedLinear(P_x, *others, **options, **placing.options))

    kept = {d: blocks for d, blocks in case.sizes.items() if d < len(case.shape) - 1}
    assert_same_as_sequential(
        lambda: torch.nn.Linear(**options),
        distributed,
        P_x,
        P_y,
        case.shape,
        placing.owned,
        sizes=case.sizes,
        output_sizes=kept,
        x=random_like_all(case.shape, case.seed).to(dtype),
        tolerance=TOLERANCE[case.dtype],
    )


def _owned(P_w: CartesianPartition, name: str, shape: torch.Size) -> Slices | None:
    """Weight blocks on the first workers along leading axes, the bias on their first column."""
    *_, rows, columns = P_w.shape
    first = P_w.create_partition_inclusive(range(rows * columns))
    P_first = first.create_cartesian_topology_partition([rows, columns])
    if P_first.index is None or (name == "bias" and P_first.index[1] > 0):
        return None
    where = own_slices((shape[0], columns), P_first)
    return own_slices(shape, P_first) if name == "weight" else (where or ())[:1]
