"""Scatter and gather: from one worker to all, and back."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false

from __future__ import annotations

import pytest
import torch

from gpudist import gather, nn, scatter
from gpudist.errors import ShapeError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.dense import (
    Tensors,
    assembled,
    assert_matches_dense,
    assert_same,
    block,
    blocks,
    cells,
    local_input,
    partition_of,
    random,
)
from tests.pool import distributed

RANKS = [3, 0, 2]


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("shape", [(5, 7), (2, 1), (3, 0)], ids=str)
@distributed(ranks=4)
def test_scatter_then_gather(P_world: Partition, root: int, shape: tuple[int, ...]) -> None:
    """Ranks other than the root pass ``None``; a worker outside gets an empty tensor."""
    P_x = partition_of(P_world, RANKS, [1, 3])
    x = cells(shape) if P_x.rank == root else None
    mine = scatter(x, P_x, root)
    if P_x.index is None:
        assert_same(mine, torch.empty(0))
    else:
        assert_same(mine, block(cells(shape), [1, 3], P_x.index))
    whole = gather(mine, P_x, root)
    if P_x.rank == root:
        assert_same(whole, cells(shape))
    elif P_x.active:
        assert_same(whole, torch.empty(shape[0], 0).double())
    else:
        assert_same(whole, mine)


@distributed(ranks=4)
def test_derivatives(P_world: Partition) -> None:
    P_x = partition_of(P_world, RANKS, [3, 1])
    root = P_x.ranks[1]

    def dense_scatter(xs: Tensors) -> Tensors:
        parts = dict(zip(RANKS, blocks(xs[root], [3, 1]), strict=True))
        return [parts[r] if r in parts else xs[r].clone() for r in range(4)]

    def dense_gather(xs: Tensors) -> Tensors:
        whole = assembled([xs[r] for r in RANKS], [3, 1])
        empty = [x.new_empty(x.shape[0], 0) if r in RANKS else x.clone() for r, x in enumerate(xs)]
        return [whole if r == root else empty[r] for r in range(4)]

    x = random((7, 2))
    given = [x if r == root else x.new_empty(7, 0) for r in range(4)]
    layer = nn.Scatter(P_x, 1)
    assert_matches_dense(layer, dense_scatter, given, P_world)
    assert_adjoint(layer, given[P_world.rank], P_world)
    parts = dict(zip(RANKS, blocks(x, [3, 1]), strict=True))
    given = [parts.get(r, x.new_empty(7, 0)) for r in range(4)]
    layer = nn.Gather(P_x, 1)
    assert_matches_dense(layer, dense_gather, given, P_world)
    assert_adjoint(layer, given[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 3, 2])
    x = cells((5, 7, 3))
    mine = scatter(x, P_x, root=5)
    assert_same(mine, local_input(x, P_x))
    assert_same(gather(mine, P_x, root=7), x if P_x.rank == 7 else x.new_empty(mine.shape[0], 0))


@distributed(ranks=3)
def test_scatter_ignores_what_others_give(P_world: Partition) -> None:
    """Values and shape are ignored, but not ``requires_grad``: backward takes part."""
    P_x = P_world.create_cartesian_topology_partition([3, 1])
    x = cells((4, 2)) if P_world.rank == 0 else torch.full((9, 1, 3), torch.nan).double()
    x.requires_grad_()
    y = scatter(x, P_x)
    assert_same(y.detach(), local_input(cells((4, 2)), P_x))
    y.sum().backward()
    if P_world.rank == 0:
        assert_same(x.grad, torch.ones(4, 2).double())
    else:
        assert_same(x.grad, torch.zeros(9, 1, 3).double())


@distributed(ranks=3)
def test_shapes_may_change(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 3])
    for shape in ((2, 4), (2, 5), (1, 3)):
        mine = scatter(cells(shape) if P_world.rank == 0 else None, P_x)
        assert_same(mine, local_input(cells(shape), P_x))
        whole = gather(mine, P_x)
        assert_same(whole, cells(shape) if P_world.rank == 0 else torch.empty(shape[0], 0).double())


@pytest.mark.parametrize("preserve_batch", [True, False])
@distributed(ranks=2)
def test_zero_volume_output(P_world: Partition, preserve_batch: bool) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    whole = gather(cells((3, 2), torch.float16), P_x, 0, preserve_batch)
    if P_world.rank == 1:
        assert_same(whole, torch.empty((3, 0) if preserve_batch else (0,), dtype=torch.float16))


@distributed(ranks=3)
def test_root_without_a_tensor_is_refused_everywhere(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3, 1])
    with pytest.raises(ShapeError, match="x is None on the root"):
        scatter(None, P_x, 2)
