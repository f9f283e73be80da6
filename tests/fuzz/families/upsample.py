"""Interpolations, and shuffles of pixels and channels, over any partition."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.fuzz.case import TOLERANCE, Case, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import assert_same_as_sequential, own_block, random_like_all

SHUFFLES = ("ChannelShuffle", "PixelShuffle", "PixelUnshuffle")
LAYERS = (*SHUFFLES, "Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d")
MODES = {
    1: ("nearest", "nearest-exact", "linear", "area"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
    3: ("nearest", "nearest-exact", "trilinear", "area"),
}
ARGUMENT = {
    "ChannelShuffle": "groups",
    "PixelShuffle": "upscale_factor",
    "PixelUnshuffle": "downscale_factor",
}


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    options: dict[str, Any] = {}
    if layer in SHUFFLES:
        shape, options = _draw_shuffle(random, layer)
    else:
        dims = 2 if layer.endswith("2d") else random.randint(1, 3)
        shape = (
            *(random.randint(1, 3) for _ in range(2)),
            *(random.randint(1, (0, 80, 12, 6)[dims]) for _ in range(dims)),
        )
        options = _draw_extents(random, shape)
        if layer == "Upsample":
            options["mode"] = mode = random.choice(MODES[dims])
            if "linear" in mode or mode == "bicubic":
                options["align_corners"] = random.random() < 0.4
            if "scale_factor" in options and random.random() < 0.2:
                options["recompute_scale_factor"] = True
    grid = draw_grid(random, len(shape), range(len(shape)), ranks)
    sizes = draw_sizes(random, shape, grid, range(len(shape)))
    return Case(layer, grid, shape, options, sizes, draw_dtype(random), random.randint(0, 99))


def _draw_shuffle(random: random.Random, layer: str) -> tuple[tuple[int, ...], dict[str, Any]]:
    factor = random.randint(1, 3)
    # Torch refuses what is no multiple.
    channels, *features = (random.randint(1, n) for n in (3, 5, 5))
    batch = random.randint(1, 3)
    options = {ARGUMENT[layer]: factor}
    if layer == "ChannelShuffle":
        return (batch, factor * channels, *features), options
    if layer == "PixelShuffle":
        return (batch, factor * factor * channels, *features), options
    return (batch, channels, *(factor * n for n in features)), options


def _draw_extents(random: random.Random, shape: tuple[int, ...]) -> dict[str, Any]:
    if random.random() < 0.5:
        size = tuple(random.randint(1, 2 * n + 2) for n in shape[2:])
        return {"size": random.choice([size, size[0]])}
    scales = tuple(random.uniform(0.2, 3) for _ in shape[2:])
    known = random.choice([1, 2, 2, 4, 3, 0.5, 1.5, 1.05, 2.05, 2.3])
    return {"scale_factor": random.choice([scales, scales[0], float(known), float(known)])}


class Adjoint(torch.nn.Upsample):
    """Torch's output, and the adjoint of it for a gradient: torch's own is not always that."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        spatial = input.shape[2:]
        units = torch.eye(prod(spatial), dtype=input.dtype).view(-1, 1, *spatial)
        outputs = super().forward(units)
        y = input.flatten(2) @ outputs.flatten(1)
        torch.testing.assert_close(y.unflatten(2, outputs.shape[2:]), super().forward(input))
        return y.unflatten(2, outputs.shape[2:])


def _has_another_gradient(case: Case) -> bool:
    mode = case.options.get("mode", "")
    return (
        case.layer == "UpsamplingNearest2d"
        or mode.startswith("nearest")
        or (mode == "bicubic" and "scale_factor" in case.options)
    )


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    x = random_like_all(case.shape, case.seed).to(getattr(torch, case.dtype))

    def sequential() -> torch.nn.Module:
        if _has_another_gradient(case):
            return Adjoint(**case.options)
        if case.layer in SHUFFLES:
            return getattr(torch.nn, case.layer)(*case.options.values())
        return getattr(torch.nn, case.layer)(**case.options)

    def distributed() -> torch.nn.Module:
        return getattr(nn, f"Distributed{case.layer}")(P_x, **case.options)

    if torch_refuses(lambda: sequential()(x)):
        # There is nothing to compare with; an error must be ours, or torch's.
        distributed()(own_block(x, P_x, case.sizes))
        return
    kept = {"ChannelShuffle": 4, "PixelShuffle": 1, "PixelUnshuffle": 1}.get(case.layer, 2)
    assert_same_as_sequential(
        sequential,
        distributed,
        P_x,
        P_x,
        case.shape,
        sizes=case.sizes,
        output_sizes={d: blocks for d, blocks in case.sizes.items() if d < kept},
        x=x,
        tolerance=TOLERANCE[case.dtype],
    )
