"""Distributed group and instance normalization, with groups split in any way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import CartesianPartition, Partition
from tests.nn.compare import Cut, assert_block_of, grid, own_block, own_slices, random_like_all
from tests.nn.norm.norm_cases import (
    F64,
    GRIDS,
    Made,
    assert_groups,
    check_penalty,
    make_both,
    owner,
)
from tests.pool import distributed
from tests.torchs_layers import torchs_layer

SHAPE = (3, 12, 5, 4)
CASES = {**GRIDS, "uneven": ([1, 4, 2, 1], [7, 6, 5, 4, 3, 2, 1, 0])}
SIZES: dict[str, Cut] = {"uneven": {1: [5, 0, 1, 6], 2: [4, 1]}}


def group_norms(P_x: CartesianPartition, groups: int, channels: int = 12, **options: Any) -> Made:
    return make_both(
        lambda: torchs_layer(
            "GroupNorm", num_groups=groups, num_channels=channels, dtype=F64, **options
        ),
        lambda: nn.DistributedGroupNorm(P_x, groups, channels, dtype=F64, **options),
        owner(P_x, [1]),
    )


def instance_norms(P_x: CartesianPartition, channels: int, **options: Any) -> Made:
    dims = P_x.dim - 2
    sequential, layer = f"InstanceNorm{dims}d", f"DistributedInstanceNorm{dims}d"
    return make_both(
        lambda: torchs_layer(sequential, num_features=channels, dtype=F64, **options),
        lambda: getattr(nn, layer)(P_x, channels, dtype=F64, **options),
        owner(P_x, [1]),
    )


@pytest.mark.parametrize("of", ["input", "parameters"])
@pytest.mark.parametrize("case", CASES)
@distributed(ranks=9, transports=["loopback"])
def test_double_backward(P_world: Partition, case: str, of: str) -> None:
    P_x = grid(P_world, *CASES[case])
    made = group_norms(P_x, 4)
    check_penalty(made, P_x, SHAPE, owner(P_x, [1]), of, SIZES.get(case))


@distributed(ranks=4, transports=["loopback"])
def test_messages(P_world: Partition) -> None:
    """One group forward and backward where something is split that belongs together; else none."""
    P_c, P_f = grid(P_world, [1, 4, 1]), grid(P_world, [1, 1, 4])
    cases = (
        (nn.DistributedGroupNorm(P_c, 4, 8, global_shape=(2, 8, 4)), (2, 2, 4), 0),
        (nn.DistributedGroupNorm(P_c, 2, 8, global_shape=(2, 8, 4)), (2, 2, 4), 1),
        (nn.DistributedGroupNorm(P_f, 2, 8, global_shape=(2, 8, 4)), (2, 8, 1), 1),
        (nn.DistributedInstanceNorm1d(P_c, 8, global_shape=(2, 8, 4)), (2, 2, 4), 0),
        (nn.DistributedInstanceNorm1d(P_f, 8, global_shape=(2, 8, 4)), (2, 8, 1), 1),
    )
    for layer, shape, expected in cases:
        assert_groups(P_world, layer, shape, expected)


@pytest.mark.parametrize("tracks", [True, False])
@distributed(ranks=9, transports=["loopback"])
def test_double_backward_of_instances(P_world: Partition, tracks: bool) -> None:
    P_x = grid(P_world, *GRIDS["mixed"])
    made = instance_norms(P_x, 12, affine=True, track_running_stats=tracks)
    check_penalty(made, P_x, SHAPE, owner(P_x, [1]), "input")


@distributed(ranks=4, transports=["loopback"])
def test_large_mean(P_world: Partition) -> None:
    """The mean is 1e4 standard deviations from zero, in float32, without a known shift."""
    P_x, shape = grid(P_world, [1, 2, 2]), (2, 6, 500)
    whole = (random_like_all(shape, 1) + 1e4).float()
    expected = torch.nn.GroupNorm(2, 6, dtype=F64)(whole.double())
    y = nn.DistributedGroupNorm(P_x, 2, 6)(own_block(whole, P_x))
    assert_block_of(y.double(), expected, own_slices(shape, P_x), "output", 2e-6)


@distributed(ranks=4, transports=["loopback"])
def test_refused(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 2, 2])
    with pytest.raises(ShapeError, match="8 channels cannot be divided into 3 groups"):
        nn.DistributedGroupNorm(P_x, 3, 8)
    with pytest.raises(PartitionError, match="needs an axis for the batch"):
        nn.DistributedGroupNorm(grid(P_world, [4]), 3, 6)
    with pytest.raises(PartitionError, match="needs 4 axes"):
        nn.DistributedInstanceNorm2d(P_x, 3)
    with pytest.raises(ShapeError, match="has 4 channels, not 8"):
        nn.DistributedGroupNorm(P_x, 4, 8)(torch.randn(2, 2, 3))
    with pytest.raises(ShapeError, match="has 4 channels, not 8"):
        nn.DistributedInstanceNorm1d(P_x, 8)(torch.randn(2, 2, 3))
    here = 1 if P_x.index is not None and P_x.index[2] == 0 else 0
    with pytest.raises(ShapeError, match="expected more than 1 value per group"):
        nn.DistributedGroupNorm(P_x, 4, 4)(torch.randn(1, 2, here))
    with pytest.raises(ShapeError, match="expected more than 1 spatial element"):
        nn.DistributedInstanceNorm1d(P_x, 4)(torch.randn(1, 2, here))
