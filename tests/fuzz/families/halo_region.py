"""Chains of convolutions, pools, pads and pointwise modules over one wide halo."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist.world.partition import Partition
from tests.fuzz.case import TOLERANCE, Case, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import own_block, random_like_all
from tests.nn.placing import Placing, draw_placing
from tests.nn.windowed.halo_region_cases import (
    LOCAL,
    Chain,
    check as check_chain,
    owner,
    region,
    sequential,
)

LAYERS = ("HaloRegion",)
WITH_PARAMETERS = ("Conv", "Conv", "ConvTranspose", "CausalConv")
WINDOWED = (*WITH_PARAMETERS, "MaxPool", "AvgPool", "LPPool", "ConstantPad")
KINDS = (*WINDOWED, "pointwise", "pointwise")
# Roots of negative numbers are none, and gradients of a root grow without bound towards 0.
ROOTS = "LPPool"


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = random.choice([1, 1, 2, 2, 3])
    channels = random.randint(1, 3)
    shape = (
        random.randint(1, 3),
        channels,
        *(random.randint(1, (0, 24, 12, 7)[dims]) for _ in range(dims)),
    )
    chain: list[tuple[str, dict[str, Any]]] = []
    # A chain of pointwise modules alone is refused.
    first = random.randint(0, 1)
    for number in range(random.randint(first + 1, 5)):
        kind = random.choice(WINDOWED if number == first else KINDS)
        if kind == "pointwise":
            chain.append((random.choice(sorted(LOCAL - {"Threshold"})), {}))
        elif kind != "CausalConv" or dims == 1:
            options = _options(random, kind, dims, channels)
            channels = options.get("out_channels", channels)
            chain.append((f"{kind}{dims}d", options))
    axes = [0, *range(2, dims + 2)]
    grid = draw_grid(random, dims + 2, axes, ranks)
    sizes = draw_sizes(random, shape, grid, axes)
    extra = {"nested": True} if random.random() < 0.2 else {}
    options = {"layers": tuple(chain)}
    dtype, seed = draw_dtype(random), random.randint(0, 99)
    return Case(layer, grid, shape, options, sizes, dtype, seed, extra | draw_placing(random))


def _options(random: random.Random, kind: str, dims: int, channels: int) -> dict[str, Any]:
    def each(low: int, high: int) -> Any:
        entries = tuple(random.randint(low, high) for _ in range(dims))
        return random.choice([entries, entries[0]])

    if kind == "ConstantPad":
        widths = tuple(random.randint(-1, 4) for _ in range(2 * dims))
        return {"padding": widths, "value": random.choice([0.0, 0.5])}
    options: dict[str, Any] = {"kernel_size": each(1, 4)}
    if random.random() < 0.5:
        options["stride"] = each(1, 3)
    if kind in WITH_PARAMETERS:
        options |= {"in_channels": channels, "out_channels": random.randint(1, 3)}
        options["bias"] = random.random() < 0.7
    elif random.random() < 0.4:
        options["ceil_mode"] = True
    if kind == "LPPool":
        return {"norm_type": random.choice([1, 2, 3, float("inf")]), **options}
    if kind in (*WITH_PARAMETERS, "MaxPool") and random.random() < 0.4:
        options["dilation"] = each(1, 3)
    if kind != "CausalConv" and random.random() < 0.6:
        options["padding"] = each(0, 5 if kind == "Conv" else 2)
    if kind == "AvgPool" and random.random() < 0.4:
        options["count_include_pad"] = False
    return options


def check(case: Case, P_world: Partition) -> None:
    dtype = getattr(torch, case.dtype)
    P_x = scattered(P_world, case.grid, case.seed)
    chain = _chain(case)
    x = random_like_all(case.shape, case.seed).to(dtype)

    if torch_refuses(lambda: sequential(chain, dtype)(x)):
        # There is nothing to compare with; an error must be ours, or torch's.
        region(P_x, chain, dtype)(own_block(x, P_x, case.sizes))
        return
    agreement = {"nested": case.extra.get("nested", False)}
    check_chain(
        P_x, chain, case.shape, case.sizes, x, dtype=dtype, tolerance=TOLERANCE[case.dtype],
        agreement=agreement, placing=Placing(case.extra, owner(P_x)),
    )  # fmt: skip


def _chain(case: Case) -> Chain:
    chain: list[tuple[str, dict[str, Any]]] = []
    for name, options in case.options["layers"]:
        if name.startswith(ROOTS):
            chain.append(("Sigmoid", {}))
        chain.append((name, options))
    return chain
