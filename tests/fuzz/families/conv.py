"""Convolutions: on ``P_x`` alone, and with channels cut over ``P_x``, ``P_y`` and ``P_w``."""

from __future__ import annotations

import random
from typing import Any

import torch

from gpudist import nn
from gpudist.world.partition import CartesianPartition, Partition
from tests.fuzz.case import TOLERANCE, Case, require_a_right_kernel, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.affine.conv_cases import CausalConv1d, owner
from tests.nn.compare import assert_same_as_sequential, own_block, random_like_all
from tests.nn.placing import Placing, draw_placing

LAYERS = ("CausalConv1d", "Conv1d", "Conv2d", "Conv3d")
Partitions = tuple[CartesianPartition, tuple[CartesianPartition, CartesianPartition] | None]


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims, groups = int(layer[-2]), random.choice([1, 1, 1, 2, 3])
    shape = (
        random.randint(1, 3),
        groups * random.randint(1, 3),
        *(random.randint(1, (0, 16, 9, 6)[dims]) for _ in range(dims)),
    )

    def each(low: int, high: int) -> Any:
        entries = tuple(random.randint(low, high) for _ in range(dims))
        return random.choice([entries, entries[0]])

    options = {
        "out_channels": groups * random.randint(1, 3),
        "kernel_size": each(1, 4),
        "stride": each(1, 3),
        "dilation": each(1, 2),
        "padding": random.choice([0, each(0, 3), each(0, 7), "same", "valid"]),
        "padding_mode": random.choice(["zeros", "circular", "reflect", "replicate"]),
        "groups": groups,
        "bias": random.random() < 0.7,
    }
    if layer == "CausalConv1d":
        del options["padding"]
        options["padding_mode"] = random.choice(["zeros", "replicate"])
    extra: dict[str, Any] = {"nested": True} if random.random() < 0.2 else {}
    axes = [0, *range(2, dims + 2)]
    if random.random() < 0.3 and ranks > 1:
        extra["outputs"] = random.randint(1, ranks)
        axes = list(range(1, dims + 2))
        ranks //= extra["outputs"]
    grid = draw_grid(random, dims + 2, axes, ranks)
    return Case(
        layer,
        grid,
        shape,
        options,
        draw_sizes(random, shape, grid, [0, *range(2, dims + 2)]),
        draw_dtype(random),
        random.randint(0, 99),
        extra | draw_placing(random),
    )


def check(case: Case, P_world: Partition) -> None:
    dtype = getattr(torch, case.dtype)
    options = {"in_channels": case.shape[1], **case.options, "dtype": dtype}
    P_x, others = _partitions(case, P_world)
    x = random_like_all(case.shape, case.seed).to(dtype)
    P_y, P_w = others or (P_x, P_x)
    parts = (P_w.shape[0], P_w.shape[1]) if others else (1, 1)
    placing = Placing(case.extra, owner(P_w, parts))

    def sequential() -> torch.nn.Module:
        if case.layer == "CausalConv1d":
            return CausalConv1d(**options)
        return getattr(torch.nn, case.layer)(**options)

    def distributed() -> torch.nn.Module:
        make = getattr(nn, f"Distributed{case.layer}")
        nested = case.extra.get("nested", False)
        layer = make(P_x, *(others or ()), **options, **placing.options, nested=nested)
        return placing.around(layer)

    if torch_refuses(lambda: require_a_right_kernel(case, sequential()(x).shape[-1])):
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
    outputs = case.extra.get("outputs", inputs)
    diagonal = case.options.get("groups", 1) > 1
    P_y = scattered(P_world, (1, outputs, *spatial), case.seed + 1 if case.seed else 0)
    P_w = scattered(P_world, (outputs, 1 if diagonal else inputs, *spatial), case.seed)
    return P_x, (P_y, P_w)
