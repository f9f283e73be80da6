"""Padding layers over any partition of batch, channels and features."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.fuzz.case import TOLERANCE, Case, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import assert_same_as_sequential, own_block, random_like_all

KINDS = ("Circular", "Constant", "Reflection", "Replication", "Zero")
LAYERS = tuple(f"{kind}Pad{dims}d" for kind in KINDS for dims in (1, 2, 3))


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = int(layer[-2])
    shape = (
        *(random.randint(1, 3) for _ in range(2)),
        *(random.randint(1, (0, 16, 9, 6)[dims]) for _ in range(dims)),
    )
    widest = random.choice([1, 3, 3, 8])
    narrowest = random.choice([0, 0, -2])
    widths = tuple(random.randint(narrowest, widest) for _ in range(2 * dims))
    options: dict[str, Any] = {"padding": random.choice([widths, widths, widths[0]])}
    if layer.startswith("Constant"):
        options["value"] = random.choice([0.0, 3.5, -1.0])
    grid = draw_grid(random, dims + 2, range(dims + 2), ranks)
    sizes = draw_sizes(random, shape, grid, range(dims + 2))
    extra = {"nested": True} if random.random() < 0.2 else {}
    return Case(
        layer, grid, shape, options, sizes, draw_dtype(random), random.randint(0, 99), extra
    )


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    x = random_like_all(case.shape, case.seed).to(getattr(torch, case.dtype))

    def sequential() -> torch.nn.Module:
        return getattr(torch.nn, case.layer)(**case.options)

    def distributed() -> torch.nn.Module:
        nested = case.extra.get("nested", False)
        return getattr(nn, f"Distributed{case.layer}")(P_x, **case.options, nested=nested)

    if torch_refuses(lambda: sequential()(x)):
        # There is nothing to compare with; an error must be ours, or torch's.
        distributed()(own_block(x, P_x, case.sizes))
        return
    assert_same_as_sequential(
        sequential,
        distributed,
        P_x,
        P_x,
        case.shape,
        sizes=case.sizes,
        output_sizes={d: blocks for d, blocks in case.sizes.items() if d < 2},
        x=x,
        tolerance=TOLERANCE[case.dtype],
    )
