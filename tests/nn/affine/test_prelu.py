"""PReLU: one slope for all channels, and channels that do not fit; the rest is the contract's."""

from __future__ import annotations

import pytest
import torch

from gpudist.errors import PartitionError, ShapeError
from gpudist.nn import DistributedPReLU
from gpudist.world.partition import Partition
from tests.nn.compare import assert_same_as_sequential, grid, own_block, random_like_all
from tests.pool import distributed


@pytest.mark.parametrize("replicate", [False, True])
@distributed(ranks=4)
def test_one_slope(P_world: Partition, replicate: bool) -> None:
    P_x = grid(P_world, [1, 2, 2])
    assert_same_as_sequential(
        lambda: torch.nn.PReLU(dtype=torch.float64),
        lambda: DistributedPReLU(P_x, dtype=torch.float64, replicate_parameters=replicate),
        P_x, P_x, (2, 3, 7),
        lambda name, shape: (slice(0, 1),) if replicate or P_world.rank == 0 else None,
    )  # fmt: skip


@distributed(ranks=2)
def test_channels_that_do_not_fit(P_world: Partition) -> None:
    P_x = grid(P_world, [1, 2])
    x = random_like_all((3, 4), 0)
    with pytest.raises(ShapeError, match=r"4 channels in blocks of \[2, 2\], but the weight has 6"):
        DistributedPReLU(P_x, 6)(own_block(x, P_x))
    with pytest.raises(ShapeError, match=r"4 channels in blocks of \[1, 3\]"):
        DistributedPReLU(P_x, 4)(own_block(x, P_x, {1: [1, 3]}))
    with pytest.raises(PartitionError, match="needs an axis for the batch"):
        DistributedPReLU(grid(P_world, [2]))
