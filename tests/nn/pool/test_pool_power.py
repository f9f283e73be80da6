"""Distributed power-average pooling is the sequential one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import assert_same_as_sequential, grid, own_block
from tests.pool import distributed
from tests.torchs_layers import torchs_layer

DISTRIBUTED: Any = [nn.DistributedLPPool1d, nn.DistributedLPPool2d, nn.DistributedLPPool3d]


def check(P_x: CartesianPartition, *window: Any, x: torch.Tensor, **options: Any) -> None:
    dim = x.dim() - 3
    options |= dict(zip(("norm_type", "kernel_size", "stride"), window, strict=False))
    assert_same_as_sequential(
        lambda: torchs_layer(f"LPPool{dim + 1}d", **options),
        lambda: DISTRIBUTED[dim](P_x, **options),
        P_x, P_x, x.shape, x=x, tolerance=1e-12,
    )  # fmt: skip


@distributed(ranks=2, transports=["loopback"])
def test_zeros_have_the_gradient_of_torch(P_world: Partition) -> None:
    check(grid(P_world, [1, 1, 2]), 1, 3, 1, x=torch.zeros(1, 1, 8, dtype=torch.float64))


@distributed(ranks=2, transports=["loopback"])
def test_what_is_not_supported_is_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 2])
    with pytest.raises(PartitionError, match="LPPool2d: P_x has shape"):
        nn.DistributedLPPool2d(P_x, 2, 2)
    with pytest.raises(ShapeError, match=r"LPPool1d: .*needs 9 cells"):
        nn.DistributedLPPool1d(P_x, 2, 9)(own_block(torch.ones(1, 1, 5), P_x))
