"""Transposed convolutions, also with a given output size, and with channels cut."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import TOLERANCE, Case, require_a_right_kernel, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.affine.conv_transpose_cases import Sized, owner
from tests.nn.compare import assert_same_as_sequential, own_block, random_like_all
from tests.nn.placing import Placing, draw_placing

LAYERS = ("ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
Partitions = tuple[CartesianPartition, tuple[CartesianPartition, CartesianPartition] | None]


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims, groups = int(layer[-2]), random.choice([1, 1, 1, 2, 3])
    shape = (
        random.randint(1, 3),
        groups * random.randint(1, 3),
        *(random.randint(1, (0, 12, 6, 4)[dims]) for _ in range(dims)),
    )

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(random.randint(low, high) for _ in range(dims))

    stride, dilation = each(1, 4), each(1, 2)
    below = [max(pair) - 1 for pair in zip(stride, dilation, strict=True)]
    options: dict[str, Any] = {
        "out_channels": groups * random.randint(1, 3),
        "kernel_size": each(1, 4),
        "stride": stride,
        "padding": random.choice([(0,) * dims, each(0, 2), each(0, 4)]),
        # Torch takes no more; now and then one too many.
        "output_padding": tuple(
            random.randint(0, most + (random.random() < 0.02)) for most in below
        ),
        "dilation": dilation,
        "groups": groups,
        "bias": random.random() < 0.7,
    }
    extra: dict[str, Any] = {}
    if random.random() < 0.2:
        extra["output_size"] = _output_size(random, shape, options)
    axes = [0, *range(2, dims + 2)]
    if random.random() < 0.3 and ranks > 1:
        extra["outputs"] = random.randint(1, ranks)
        axes = list(range(1, dims + 2))
        ranks //= extra["outputs"]
    grid = draw_grid(random, dims + 2, axes, ranks)
    sizes = draw_sizes(random, shape, grid, [0, *range(2, dims + 2)])
    dtype, seed = draw_dtype(random), random.randint(0, 99)
    return Case(layer, grid, shape, options, sizes, dtype, seed, extra | draw_placing(random))


def _output_size(
    random: random.Random, shape: tuple[int, ...], options: dict[str, Any]
) -> tuple[int, ...]:
    names = "stride", "padding", "dilation", "kernel_size"
    size = tuple(
        (extent - 1) * s - 2 * p + d * (k - 1) + 1 + random.randrange(s + (random.random() < 0.02))
        for extent, s, p, d, k in zip(shape[2:], *(options[name] for name in names), strict=True)
    )
    return random.choice([size, (*shape[:2], *size)])


def check(case: Case, P_world: Partition) -> None:
    dtype = getattr(torch, case.dtype)
    options = {"in_channels": case.shape[1], **case.options, "dtype": dtype}
    P_x, others = _partitions(case, P_world)
    x = random_like_all(case.shape, case.seed).to(dtype)
    size = case.extra.get("output_size")
    P_y, P_w = others or (P_x, P_x)
    parts = (P_w.shape[0], P_w.shape[1]) if others else (1, 1)
    owned = owner(P_w, parts, diagonal=case.grid[1] > 1 and parts[1] == 1)
    placing = Placing(case.extra, lambda name, shape: owned(name.removeprefix("layer."), shape))

    def sequential() -> torch.nn.Module:
        return Sized(getattr(torch.nn, case.layer)(**options), size)

    def distributed() -> torch.nn.Module:
        make = getattr(nn, f"Distributed{case.layer}")
        layer = make(P_x, *(others or ()), **options, **placing.options)
        return placing.around(Sized(layer, size))

    if torch_refuses(
        lambda: require_a_right_kernel(case, min(x.shape[-1], sequential()(x).shape[-1]))
    ):
        # There is nothing to compare with; an error must be ours, or torch's.
        distributed()(own_block(x, P_x, case.sizes))
        return
    assert_same_as_sequential(
        sequential,
        distributed,
        P_x,
        P_y,
        case.shape,
        placing.owned,
        sizes=case.sizes,
        output_sizes={0: case.sizes[0]} if 0 in case.sizes else None,
        x=x,
        tolerance=TOLERANCE[case.dtype],
    )


def _partitions(case: Case, P_world: Partition) -> Partitions:
    P_x = scattered(P_world, case.grid, case.seed)
    batch, inputs, *spatial = case.grid
    if batch > 1 or (inputs == 1 and "outputs" not in case.extra):
        return P_x, None
    diagonal = case.options.get("groups", 1) > 1
    outputs = case.extra.get("outputs", inputs)
    P_y = scattered(P_world, (1, outputs, *spatial), case.seed + 1 if case.seed else 0)
    P_w = scattered(P_world, (outputs, 1 if diagonal else inputs, *spatial), case.seed)
    return P_x, (P_y, P_w)
