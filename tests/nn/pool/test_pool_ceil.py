"""Pools whose last windows are cut, or that move ghosts dim by dim, are the sequential ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gpudist import nn
from gpudist.world.partition import Partition
from tests.nn.compare import assert_block_of, grid, own_block, own_slices, random_like_all
from tests.nn.pool.test_pool import DISTRIBUTED, check
from tests.pool import distributed


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=2, transports=["loopback"])
def test_a_last_window_that_is_cut(P_world: Partition, kind: str) -> None:
    """Blocks have ghosts, or none if only one worker's window is cut off."""
    for window, extent in (((3, 1, 1), 12), ((2, 2, 0), 8)):
        check(kind, grid(P_world, [1, 1, 2]), *window, ceil_mode=True, shape=(2, 2, extent))
    check(kind, grid(P_world, [2, 1, 1]), 3, 2, ceil_mode=True, shape=(2, 2, 8))


@pytest.mark.parametrize("kind", DISTRIBUTED)
@distributed(ranks=4, transports=["loopback"])
def test_nested(P_world: Partition, kind: str) -> None:
    P_x = grid(P_world, [1, 1, 2, 2])
    layer = DISTRIBUTED[kind][2](P_x, 3, 2, 1, nested=True)
    assert len(layer.halo_exchange.movement(torch.zeros(1, 1, 4, 4)).steps) == 2
    check(kind, P_x, 3, 2, 1, nested=True, shape=(2, 2, 9, 8))


@distributed(ranks=3, transports=["loopback"])
def test_a_divisor_is_exact_and_none_overflows(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 1, 3])
    whole = random_like_all((2, 2, 8), 1)
    layer = nn.DistributedAvgPool1d(P_x, 3, 2, 1, True, divisor_override=7)
    expected = F.avg_pool2d(whole.unsqueeze(2), (1, 3), (1, 2), (0, 1), True, True, 7).squeeze(2)
    where = own_slices(expected.shape, P_x)
    assert_block_of(layer(own_block(whole, P_x)).detach(), expected, where, "output")
    large = torch.full((1, 1, 9), 6e4, dtype=torch.float16)
    y = nn.DistributedAvgPool1d(P_x, 3)(own_block(large, P_x))
    assert torch.equal(y, torch.full_like(y, 6e4))
