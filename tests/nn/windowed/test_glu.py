"""GLU along a dim that may be split equals torch's, for any blocks."""

from __future__ import annotations

import pytest
import torch

import gpudist
from gpudist import nn
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
from gpudist.world.partition import Partition
from tests.nn.compare import Cut, assert_same_as_sequential, grid, own_block, random_like_all
from tests.pool import distributed

# Grid, shape, dim, and sizes of the input's blocks.
CASES: list[tuple[list[int], tuple[int, ...], int, Cut]] = [
    ([1, 4], (2, 8), 1, {}),
    ([1, 4], (2, 10), -1, {}),
    ([1, 4], (2, 2), 1, {}),
    ([1, 4], (2, 0), 1, {}),
    ([1, 4], (0, 6), 1, {}),
    ([1, 3], (2, 6), 1, {1: [5, 0, 1]}),
    ([1, 3], (2, 6), 1, {1: [0, 6, 0]}),
    ([3, 1], (6, 3), 0, {0: [1, 1, 4]}),
    ([2, 2, 1], (3, 6, 2), 1, {0: [1, 2], 1: [4, 2]}),
    ([2, 2, 1], (3, 6, 2), 2, {0: [3, 0], 1: [1, 5]}),
]


@distributed(ranks=4, transports=["loopback"])
def test_any_blocks(P_world: Partition) -> None:
    for parts, shape, dim, sizes in CASES:
        P_x = grid(P_world, parts)
        assert_same_as_sequential(
            lambda dim=dim: torch.nn.GLU(dim),
            lambda dim=dim, P_x=P_x: nn.DistributedGLU(P_x, dim),
            P_x,
            P_x,
            shape,
            sizes=sizes,
            output_sizes={d: blocks for d, blocks in sizes.items() if d != dim},
            tolerance=1e-12,
        )


@distributed(ranks=4, transports=["loopback"])
def test_a_whole_dim_sends_nothing_and_others_may_change(P_world: Partition) -> None:
    layer = nn.DistributedGLU(grid(P_world, [2, 2, 1]), 2)
    before = P_world.wire.recorder.lines(last=1)
    for shape in ((3, 2, 4), (1, 5, 4), (3, 2, 8)):
        x = torch.randn(shape)
        assert torch.equal(layer(x), torch.nn.functional.glu(x, 2))
    assert P_world.wire.recorder.lines(last=1) == before


@distributed(ranks=4, transports=["loopback", "host"])
def test_each_cell_is_sent_at_most_once(P_world: Partition) -> None:
    """The first and the last rank keep 2 of 16 numbers each."""
    P_x = grid(P_world, [1, 4])
    layer = nn.DistributedGLU(P_x)
    x = own_block(random_like_all((1, 16), 1), P_x)
    layer(x)
    gpudist.stats(reset=True, P_world=P_world)
    layer(x)
    assert sum(row.sent_bytes for row in gpudist.stats(all_ranks=True, P_world=P_world)) == 96


@distributed(ranks=4, transports=["loopback", "host"])
def test_an_odd_or_new_extent_is_refused_on_every_rank(P_world: Partition) -> None:
    P_x = grid(P_world, [2, 2])
    with pytest.raises(PartitionError, match=r"DistributedGLU: dim 2 is not one of the 2 axes"):
        nn.DistributedGLU(P_x, 2)
    for dim, shape in ((0, (3, 4)), (1, (4, 5)), (-2, (1, 4))):
        whole = random_like_all(shape, 1)
        with pytest.raises(ShapeError, match=rf"dim {dim % 2}: the global extent \d is odd"):
            nn.DistributedGLU(P_x, dim)(own_block(whole, P_x))
    layer = nn.DistributedGLU(P_x)
    layer(own_block(random_like_all((4, 4), 1), P_x))
    P_world.barrier()  # the refusal ends what others may still be busy with
    with pytest.raises(PlanMismatch, match="create a layer for each extent"):
        layer(own_block(random_like_all((4, 8), 1), P_x))
