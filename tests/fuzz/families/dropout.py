"""Dropout: torch's own cells, or the same ones under every partition."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.fuzz.case import Case
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import assert_block_of, gradient_of, own_block, own_slices, random_like_all

LAYERS = (
    "AlphaDropout",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
)


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = int(layer[-2]) + 2 if layer.endswith("d") else random.randint(2, 4)
    if layer in ("Dropout1d", "Dropout3d") and random.random() < 0.2:
        dims -= 1
    shape = tuple(random.randint(0 if random.random() < 0.05 else 1, 5) for _ in range(dims))
    options: dict[str, Any] = {
        "p": random.choice([0.0, 0.1, 0.5, 0.5, 0.9, 1.0]),
        "generator": random.choice(["index", "torch"]),
    }
    grid = draw_grid(random, dims, range(dims), ranks)
    sizes = draw_sizes(random, shape, grid, range(dims))
    return Case(layer, grid, shape, options, sizes, draw_dtype(random), random.randint(0, 99))


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    options = {"p": 0.5, "generator": "index", **case.options}
    if options["generator"] == "index":
        options["seed"] = case.seed
    distributed = getattr(nn, f"Distributed{case.layer}")(P_x, **options)
    if options["generator"] == "index":
        # There is no sequential layer but itself, on the whole tensor.
        alone = P_world.create_partition_inclusive([P_world.rank or 0])
        P_whole = alone.create_cartesian_topology_partition((1,) * len(case.shape))
        sequential = getattr(nn, f"Distributed{case.layer}")(P_whole, **options)
    else:
        sequential = getattr(torch.nn, case.layer)(options["p"])
    whole = random_like_all(case.shape, case.seed).to(getattr(torch, case.dtype)).requires_grad_()
    block = own_block(whole, P_x, case.sizes)
    where = own_slices(case.shape, P_x, case.sizes)
    cotangent = random_like_all(case.shape, case.seed + 1).to(whole.dtype)
    for _ in range(2):
        torch.manual_seed(case.seed)
        y_whole = sequential(whole)
        torch.manual_seed(case.seed)
        y = distributed(block)
        assert_block_of(y.detach(), y_whole.detach(), where, "output", 0)
        # Torch may keep the tensor it is given as the gradient.
        y_whole.backward(cotangent.clone())
        y.backward(torch.zeros_like(y) if where is None else cotangent[where])
        assert_block_of(block.grad, gradient_of(whole), where, "input gradient", 0)
