"""Pools over any partition of batch, channels and features."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.partition import Partition
from tests.fuzz.case import TOLERANCE, Case, Feature, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import assert_same_as_sequential, own_block, random_like_all

LAYERS = ("AvgPool1d", "AvgPool2d", "AvgPool3d", "MaxPool1d", "MaxPool2d", "MaxPool3d")


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = int(layer[-2])

    def each(low: int, high: int) -> Any:
        entries = tuple(random.randint(low, high) for _ in range(dims))
        return random.choice([entries, entries[0]])

    shape = (
        *(random.randint(1, 3) for _ in range(2)),
        *(random.randint(1, (0, 16, 9, 6)[dims]) for _ in range(dims)),
    )
    options = {"kernel_size": each(1, 4), "padding": random.choice([0, each(0, 2)])}
    if random.random() < 0.7:
        options["stride"] = each(1, 4)
    if random.random() < 0.2:
        options["ceil_mode"] = True
    if layer.startswith("Max") and random.random() < 0.4:
        options["dilation"] = each(1, 3)
    if layer.startswith("Avg") and random.random() < 0.4:
        options["count_include_pad"] = False
    if layer in ("AvgPool2d", "AvgPool3d") and random.random() < 0.2:
        options["divisor_override"] = random.randint(1, 5)
    grid = draw_grid(random, dims + 2, range(dims + 2), ranks)
    sizes = draw_sizes(random, shape, grid, range(dims + 2))
    # Torch has no kernel for it, and says so differently for each shape.
    dtype = draw_dtype(random) if layer != "AvgPool3d" else "float64"
    return Case(layer, grid, shape, options, sizes, dtype, random.randint(0, 99))


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    x = random_like_all(case.shape, case.seed).to(getattr(torch, case.dtype))

    def sequential() -> torch.nn.Module:
        return getattr(torch.nn, case.layer)(**case.options)

    def distributed() -> torch.nn.Module:
        return getattr(nn, f"Distributed{case.layer}")(P_x, **case.options)

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


PADDED = {"kernel_size": 3, "padding": 1}
ROWS: dict[str, tuple[tuple[str, dict[str, Any], dict[int, tuple[int, ...]]], ...]] = {
    "MaxPool2d": (
        ("stride = kernel", {"kernel_size": 2}, {}),
        ("stride, padding", {**PADDED, "stride": 2}, {}),
        ("dilation", {"kernel_size": 2, "dilation": 2}, {}),
        ("ceil_mode", {"kernel_size": 2, "ceil_mode": True}, {}),
        ("uneven blocks", {"kernel_size": 2}, {2: (2, 7)}),
        ("empty blocks", {"kernel_size": 2}, {2: (9, 0)}),
    ),
    "AvgPool2d": (
        ("stride, padding", {**PADDED, "stride": 2}, {}),
        ("count_include_pad=False", {**PADDED, "count_include_pad": False}, {}),
        ("divisor_override", {"kernel_size": 2, "divisor_override": 3}, {}),
        ("ceil_mode", {"kernel_size": 2, "ceil_mode": True}, {}),
        ("uneven blocks", {"kernel_size": 2}, {2: (2, 7)}),
    ),
}
FEATURES = tuple(
    Feature(layer, feature, options, (2, 4, 9, 8), sizes)
    for layer, rows in ROWS.items()
    for feature, options, sizes in rows
)


def grids(feature: Feature) -> dict[str, tuple[int, ...]]:
    if feature.sizes:
        return {"features": (1, 1, 2, 2), "mixed": (2, 1, 2, 2)}
    return {
        "batch": (2, 1, 1, 1),
        "channels": (1, 3, 1, 1),
        "features": (1, 1, 3, 2),
        "mixed": (2, 2, 2, 1),
    }
