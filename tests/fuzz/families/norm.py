"""Normalizations over any partition of batch, channels and features."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import Case, torch_refuses
from tests.fuzz.drawing import draw_grid, draw_sizes, scattered
from tests.nn.compare import own_block, random_like_all
from tests.nn.norm.norm_cases import check as check_made, make_both, owner
from tests.nn.placing import Placing, draw_placing
from tests.torchs_layers import torchs_layer

F64 = torch.float64
BATCH = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
INSTANCE = ("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d")
LAYERS = (*BATCH, "GroupNorm", *INSTANCE, "LayerNorm", "RMSNorm")


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = int(layer[-2]) + 2 if layer.endswith("d") else random.randint(1, 5)
    if layer == "GroupNorm":
        dims = max(dims, 2)
    shape = tuple(random.randint(1, (0, 9, 9, 8, 6, 4)[dims]) for _ in range(dims))
    options: dict[str, Any] = {}
    if layer in ("LayerNorm", "RMSNorm"):
        options["normalized_shape"] = shape[random.randrange(dims) :]
        if random.random() < 0.2:
            options["elementwise_affine"] = False
    elif layer == "GroupNorm":
        size, groups = random.randint(1, 4), random.randint(1, 4)
        shape = (shape[0], size * groups, *shape[2:])
        options |= {"num_groups": groups, "num_channels": size * groups}
    else:
        options["num_features"] = shape[1]
        if random.random() < 0.5:
            options["track_running_stats"] = random.choice([True, False])
        if random.random() < 0.3:
            options["momentum"] = random.choice([0.0, 0.5, 1.0, None])
    if layer not in ("LayerNorm", "RMSNorm") and random.random() < 0.5:
        options["affine"] = random.choice([True, False])
    if layer != "RMSNorm" and random.random() < 0.2:
        options["bias"] = False
    if random.random() < 0.2:
        options["eps"] = 0.1
    grid = draw_grid(random, dims, range(dims), ranks)
    sizes = draw_sizes(random, shape, grid, range(dims))
    extra = {"evaluates": True} if random.random() < 0.3 else {}
    seed = random.randint(0, 99)
    return Case(layer, grid, shape, options, sizes, "float64", seed, extra | draw_placing(random))


def check(case: Case, P_world: Partition) -> None:
    """Check in training, and perhaps afterwards in evaluation."""
    P_x = scattered(P_world, case.grid, case.seed)
    x = random_like_all(case.shape, case.seed)
    placing = Placing(case.extra, owner(P_x, _parameter_axes(case, P_x)))

    def sequential() -> torch.nn.Module:
        return torchs_layer(case.layer, **case.options, dtype=F64)

    def distributed() -> torch.nn.Module:
        make = getattr(nn, f"Distributed{case.layer}")
        return placing.around(make(P_x, **case.options, **placing.options, dtype=F64))

    if torch_refuses(lambda: sequential()(x)):
        # There is nothing to compare with; an error must be ours, or torch's.
        distributed()(own_block(x, P_x, case.sizes))
        return
    made = make_both(sequential, distributed, placing.owned)
    for mode in (True, False) if case.extra.get("evaluates") else (True,):
        for module in made:
            module.train(mode)
        check_made(made, P_x, case.shape, placing.owned, case.sizes, x=x)


def _parameter_axes(case: Case, P_x: CartesianPartition) -> range:
    normalized = case.options.get("normalized_shape", ())
    count = 1 if isinstance(normalized, int) else len(normalized)
    return range(P_x.dim - count, P_x.dim) if count else range(1, 2)
