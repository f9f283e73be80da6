"""Softmax, softmin and log-softmax along any dim, over any partition."""

from __future__ import annotations

import random

import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.fuzz.case import TOLERANCE, Case, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import assert_same_as_sequential, own_block, random_like_all

LAYERS = ("LogSoftmax", "Softmax", "Softmax2d", "Softmin")


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = random.choice([3, 4]) if layer == "Softmax2d" else random.randint(1, 4)
    shape = tuple(random.randint(0 if random.random() < 0.1 else 1, 7) for _ in range(dims))
    options = {} if layer == "Softmax2d" else {"dim": random.randint(-dims, dims - 1)}
    grid = draw_grid(random, dims, range(dims), ranks)
    sizes = draw_sizes(random, shape, grid, range(dims))
    return Case(layer, grid, shape, options, sizes, draw_dtype(random), random.randint(0, 99))


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    x = 3 * random_like_all(case.shape, case.seed).to(getattr(torch, case.dtype))

    def sequential() -> torch.nn.Module:
        return getattr(torch.nn, case.layer)(**case.options)

    def distributed() -> torch.nn.Module:
        return getattr(nn, f"Distributed{case.layer}")(P_x, **case.options)

    if torch_refuses(lambda: sequential()(x)):
        distributed()(own_block(x, P_x, case.sizes))
        return
    assert_same_as_sequential(
        sequential,
        distributed,
        P_x,
        P_x,
        case.shape,
        sizes=case.sizes,
        output_sizes=case.sizes,
        x=x,
        tolerance=TOLERANCE[case.dtype],
    )
