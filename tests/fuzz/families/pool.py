"""Pools over any partition of batch, channels and features."""

from __future__ import annotations

import random
from itertools import pairwise
from math import prod
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import Case, torch_refuses
from tests.nn.compare import assert_same_as_sequential, grid, own_block, random_like_all
from tests.nn.pool.test_pool_indices import check_with_indices
from tests.torchs_layers import torchs_layer

KINDS = ("MaxPool", "AvgPool", "LPPool", "AdaptiveMaxPool", "AdaptiveAvgPool")
LAYERS = tuple(f"{kind}{dims}d" for kind in KINDS for dims in (1, 2, 3))
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
EXTENTS = {1: 20, 2: 10, 3: 6}


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = int(layer[-2])
    extents = [random.randint(1, EXTENTS[dims]) for _ in range(dims)]
    shape = (random.randint(1, 3), random.randint(1, 3), *extents)
    options = _adaptive(random, dims) if "Adaptive" in layer else _sliding(random, layer, dims)
    if "Max" in layer and random.random() < 0.4:
        options["return_indices"] = True
    parts = _grid(random, len(shape), ranks)
    sizes = {
        d: _cut(random, n, p)
        for d, (n, p) in enumerate(zip(shape, parts, strict=True))
        if p > 1 and random.random() < 0.3
    }
    # Integers in few values, so that there are ties.
    extra = {"ties": True} if "LP" not in layer and random.random() < 0.2 else {}
    dtype = random.choice(["float64", "float64", "float64", "float32"])
    return Case(layer, parts, shape, options, sizes, dtype, random.randint(0, 999), extra)


def _each(random: random.Random, dims: int, low: int, high: int) -> Any:
    entries = tuple(random.randint(low, high) for _ in range(dims))
    return random.choice([entries, entries[0]])


def _adaptive(random: random.Random, dims: int) -> dict[str, Any]:
    size = _each(random, dims, 1, EXTENTS[dims] + 2)
    if dims > 1 and random.random() < 0.3:
        size = (None, *(random.randint(1, 4) for _ in range(dims - 1)))
    return {"output_size": 1 if random.random() < 0.2 else size}


def _sliding(random: random.Random, layer: str, dims: int) -> dict[str, Any]:
    options: dict[str, Any] = {"kernel_size": _each(random, dims, 1, 4)}
    if random.random() < 0.7:
        options["stride"] = _each(random, dims, 1, 4)
    if random.random() < 0.4:
        options["ceil_mode"] = True
    if "LP" in layer:
        return {"norm_type": random.choice([1, 2, 3, 2.5, float("inf")]), **options}
    if random.random() < 0.5:
        options["padding"] = _each(random, dims, 0, 2)
    if "Max" in layer and random.random() < 0.3:
        options["dilation"] = _each(random, dims, 1, 3)
    if "Avg" in layer and random.random() < 0.4:
        options["count_include_pad"] = False
    if "Avg" in layer and dims > 1 and random.random() < 0.2:
        options["divisor_override"] = random.randint(1, 5)
    return options


def _grid(random: random.Random, dims: int, ranks: int) -> tuple[int, ...]:
    parts = [1] * dims
    for _ in range(random.randint(1, 4)):
        d = random.randrange(dims)
        more = random.randint(1, ranks)
        if prod(parts) // parts[d] * more <= ranks:
            parts[d] = more
    return tuple(parts)


def _cut(random: random.Random, extent: int, parts: int) -> tuple[int, ...]:
    stops = [0, *sorted(random.randint(0, extent) for _ in range(parts - 1)), extent]
    return tuple(stop - start for start, stop in pairwise(stops))


def _input(case: Case) -> torch.Tensor:
    x = random_like_all(case.shape, case.seed)
    if case.extra.get("ties"):
        x = x.round()
    # A root of a negative number is none.
    x = x.abs() + 0.1 if "LP" in case.layer else x
    return x.to(getattr(torch, case.dtype))


def check(case: Case, P_world: Partition) -> None:
    workers = prod(case.grid)
    ranks = random.Random(case.seed).sample(range(P_world.size), workers)
    P_x, x = grid(P_world, case.grid, ranks), _input(case)

    def sequential() -> torch.nn.Module:
        return torchs_layer(case.layer, **case.options)

    def distributed() -> torch.nn.Module:
        return getattr(nn, f"Distributed{case.layer}")(P_x, **case.options)

    if torch_refuses(lambda: sequential()(x)):
        distributed()(own_block(x, P_x, case.sizes))
        return
    _compare(case, P_x, sequential(), distributed(), x)


def _compare(
    case: Case,
    P_x: CartesianPartition,
    sequential: torch.nn.Module,
    distributed: torch.nn.Module,
    x: torch.Tensor,
) -> None:
    outputs = {d: sizes for d, sizes in case.sizes.items() if d < 2}
    tolerance = TOLERANCE[case.dtype]
    if case.options.get("return_indices"):
        check_with_indices(
            sequential, distributed, P_x, case.shape, case.sizes, x, outputs, tolerance
        )
        return
    assert_same_as_sequential(
        lambda: sequential, lambda: distributed, P_x, P_x, case.shape,
        sizes=case.sizes, output_sizes=outputs, x=x, tolerance=tolerance,
    )  # fmt: skip
