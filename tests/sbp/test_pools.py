"""Pools of global tensors: any attributes, any cuts, against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gpudist import placement, to_global
from gpudist.sbp import Sbp, split
from gpudist.world.partition import Partition
from tests.pool import distributed
from tests.sbp.parts import B, P, S, random
from tests.sbp.tables import assert_everywhere, assert_table

# Functions and options that torch's table of samples does not have.
POOLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mean of cells alone": (
        lambda x: F.avg_pool2d(x, (3, 2), 2, 1, ceil_mode=True, count_include_pad=False),
        (2, 2, 9, 8),
    ),
    "mean by a negative divisor": (
        lambda x: F.avg_pool2d(x, 2, divisor_override=-2),
        (2, 2, 6, 4),
    ),
    "norm 1-D": (lambda x: F.lp_pool1d(x, 2, 3), (2, 2, 11)),
    "norm 2-D": (lambda x: F.lp_pool2d(x.abs() + 1, 3.0, 2, ceil_mode=True), (2, 2, 7, 8)),
    "global mean of a dim": (lambda x: F.adaptive_avg_pool2d(x, (1, None)), (2, 3, 7, 8)),
}


@pytest.mark.parametrize("name", POOLS)
@distributed(ranks=8, transports=("loopback",))
def test_pool(P_world: Partition, name: str) -> None:
    function, shape = POOLS[name]
    assert_everywhere(P_world, function, [random(shape)], (6, 4, 2), "norm" in name)


@distributed(ranks=8, transports=("loopback",))
def test_without_boxing(P_world: Partition) -> None:
    x = random((4, 3, 9, 8))
    splits = [([S(d)], S(d)) for d in range(4)]
    for function in (lambda t: F.max_pool2d(t, 3, 1, 1), lambda t: F.avg_pool2d(t, 3, 1, 1)):
        assert_table(P_world, function, [x], splits, cuts=False)
    means = [([S(0)], S(0)), ([S(1)], S(1)), ([S(2)], P), ([S(3)], P), ([P], P), ([B], B)]
    assert_table(P_world, lambda t: F.adaptive_avg_pool2d(t, 1), [x], means)


@pytest.mark.parametrize("outer", [S(4), split(4, sizes=[1, 3])], ids=["balanced", "uneven"])
@distributed(ranks=8, transports=("loopback",))
def test_a_block_as_long_as_the_kernel_is_no_mean(P_world: Partition, outer: Sbp) -> None:
    """Two axes split a dim, so that blocks of the outer one have as many cells as the kernel."""
    grid = P_world.create_cartesian_topology_partition([2, 2, 2])
    x = random((1, 2, 6, 5, 4))
    lying = to_global(x, placement.of(grid), (B, B, B)).to_global(sbp=(outer, S(2), S(4)))
    found: Any = F.avg_pool3d(lying, 2, 1)
    torch.testing.assert_close(found.full_tensor(), F.avg_pool3d(x, 2, 1))
