"""Losses: one value on every rank, and the gradient of the sequential loss."""

from __future__ import annotations

import random

import torch

from gpudist import nn
from gpudist.partition import Partition
from tests.fuzz.case import TOLERANCE, Case, Feature, torch_refuses
from tests.fuzz.drawing import draw_dtype, draw_grid, draw_sizes, scattered
from tests.nn.compare import (
    assert_block_of,
    assert_equal_to,
    gradient_of,
    own_block,
    own_slices,
    random_like_all,
)

LAYERS = ("CrossEntropyLoss", "L1Loss", "MSELoss")


def draw(random: random.Random, layer: str, ranks: int) -> Case:
    dims = random.randint(2, 4)
    shape = tuple(random.randint(1, 6) for _ in range(dims))
    grid = draw_grid(random, dims, range(dims), ranks)
    options: dict[str, object] = {"reduction": random.choice(["mean", "mean", "sum"])}
    if layer == "CrossEntropyLoss":
        if random.random() < 0.3:
            options["ignore_index"] = random.randint(0, shape[1] - 1)
        if random.random() < 0.2:
            options["label_smoothing"] = 0.1
    split = [d for d in range(dims) if d != 1 or layer != "CrossEntropyLoss"]
    sizes = draw_sizes(random, shape, grid, split)
    return Case(layer, grid, shape, options, sizes, draw_dtype(random), random.randint(0, 99))


def check(case: Case, P_world: Partition) -> None:
    P_x = scattered(P_world, case.grid, case.seed)
    dtype = getattr(torch, case.dtype)
    whole = random_like_all(case.shape, case.seed).to(dtype).requires_grad_()
    target = random_like_all(case.shape, case.seed + 1).to(dtype)
    where = own_slices(case.shape, P_x, case.sizes)
    where_target = where
    if case.layer == "CrossEntropyLoss":
        generator = torch.Generator().manual_seed(case.seed)
        of_samples = (case.shape[0], *case.shape[2:])
        target = torch.randint(0, case.shape[1], of_samples, generator=generator)
        where_target = where and (where[0], *where[2:])
    block = own_block(whole, P_x, case.sizes)
    own_target = target[:0] if where_target is None else target[where_target]

    sequential = getattr(torch.nn, case.layer)(**case.options)
    distributed = getattr(nn, f"Distributed{case.layer}")(P_x, **case.options)
    assert not torch_refuses(lambda: sequential(whole, target))
    expected, value = sequential(whole, target), distributed(block, own_target)
    tolerance = TOLERANCE[case.dtype]
    assert value.isnan() if expected.isnan() else not value.isnan()
    if expected.isnan():
        return
    assert_equal_to(value.detach(), expected.detach(), tolerance, "value")
    expected.backward()
    value.backward()
    assert_block_of(block.grad, gradient_of(whole), where, "input gradient", tolerance)


FEATURES = (
    *(
        Feature(layer, f"reduction='{reduction}'", {"reduction": reduction}, (4, 6, 5, 4))
        for layer in LAYERS
        for reduction in ("mean", "sum")
    ),
    Feature("CrossEntropyLoss", "ignore_index", {"ignore_index": 2}, (4, 6, 5, 4)),
    Feature("CrossEntropyLoss", "label_smoothing", {"label_smoothing": 0.1}, (4, 6, 5, 4)),
)


def grids(feature: Feature) -> dict[str, tuple[int, ...]]:
    return {
        "batch": (3, 1, 1, 1),
        "channels": (1, 4, 1, 1),
        "features": (1, 1, 2, 2),
        "mixed": (2, 2, 2, 1),
    }
