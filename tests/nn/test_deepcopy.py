"""Copies of layers have their own weights, and share the partitions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.world.partition import Partition
from tests.nn.compare import grid, own_block, random_like_all
from tests.pool import distributed

Make = Callable[[Any], torch.nn.Module]
F64 = torch.float64
WHOLE = (4, 2, 6, 8)

LAYERS: dict[str, Make] = {
    "conv": lambda P: nn.DistributedConv2d(P, 2, 3, 3, padding=1, dtype=F64),
    "transposed conv": lambda P: nn.DistributedConvTranspose2d(P, 2, 3, 3, dtype=F64),
    "batch norm": lambda P: nn.DistributedBatchNorm2d(P, 2, dtype=F64),
    "group norm": lambda P: nn.DistributedGroupNorm(P, 1, 2, dtype=F64),
    "max pool": lambda P: nn.DistributedMaxPool2d(P, 3, 2, 1),
    "adaptive pool": lambda P: nn.DistributedAdaptiveAvgPool2d(P, 3),
    "upsample": lambda P: nn.DistributedUpsample(P, None, 2, "bilinear"),
    "pad": lambda P: nn.DistributedReflectionPad2d(P, 1),
    "softmax": lambda P: nn.DistributedSoftmax(P, 2),
    "dropout": lambda P: nn.DistributedDropout(P, 0.5, seed=3),
    "region": lambda P: nn.HaloRegion(
        P, torch.nn.Sequential(nn.DistributedConv2d(P, 2, 2, 3, dtype=F64), torch.nn.ReLU())
    ),
    "repartition": lambda P: nn.Repartition(P, grid(P.world, [2, 1, 1, 1])),
    "summed together": lambda P: nn.fuse_parameter_movements(
        torch.nn.Sequential(
            nn.DistributedConv2d(P, 2, 2, 3, dtype=F64, replicate_parameters=True),
            nn.DistributedGroupNorm(P, 1, 2, dtype=F64, replicate_parameters=True),
        ),
        P,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
@distributed(ranks=2)
def test_copy_computes_the_same(P_world: Partition, name: str) -> None:
    """One that was made before the first call, and one made after it."""
    P_x = grid(P_world, [1, 1, 2, 1])
    layer = LAYERS[name](P_x)
    early = copy.deepcopy(layer)
    block = own_block(random_like_all(WHOLE, 1), P_x)
    expected = layer(block)
    late = copy.deepcopy(early)
    for copied in (early, late):
        y = copied(block)
        assert torch.equal(y, expected)
        y.sum().backward()
        assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in layer.parameters())
    pairs = zip(layer.parameters(), early.parameters(), strict=True)
    assert all(mine is not its and torch.equal(mine, its) for mine, its in pairs)


@distributed(ranks=2)
def test_copy_of_a_linear_layer(P_world: Partition) -> None:
    """Features split over a grid of workers."""
    P_x, P_w = grid(P_world, [1, 2]), grid(P_world, [1, 2])
    layer = nn.DistributedLinear(P_x, grid(P_world, [1, 1]), P_w, 6, 4, dtype=F64)
    block = own_block(random_like_all((3, 6), 1), P_x)
    expected = layer(block)
    copied = copy.deepcopy(layer)
    assert copied.P_x is layer.P_x
    with torch.no_grad():
        layer.weight.zero_()
    assert torch.equal(copied(block), expected)


@distributed(ranks=2)
def test_copy_agrees_for_itself(P_world: Partition) -> None:
    """Before the first call of either, a copy may have inputs of another size."""
    P_x = grid(P_world, [1, 1, 2, 1])
    layer = nn.DistributedConv2d(P_x, 2, 3, 3, padding=1, dtype=F64)
    other = copy.deepcopy(layer)
    sizes = [(*WHOLE[:2], extent, 8) for extent in (6, 9)]
    large, small = (own_block(random_like_all(size, 1), P_x) for size in sizes)
    assert layer(large).shape[2:] == large.shape[2:]
    assert other(small).shape[2:] == small.shape[2:]
