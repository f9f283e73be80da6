"""All-gather and sum-scatter, each the other's adjoint."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpudist import all_gather, nn, sum_scatter
from gpudist.errors import PartitionError, PlanMismatch, ShapeError
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
    operations,
    partition_of,
    random,
)
from tests.pool import distributed

CASES = {
    "one axis": ([0, 1, 2, 3], [2, 2], (0,), (5, 3)),
    "both axes": ([3, 1, 0, 2], [2, 2], (0, 1), (5, 3)),
    "from behind": ([0, 1, 2, 3], [2, 2], (-1,), (5, 3)),
    "no axis": ([0, 1, 2, 3], [4, 1], (), (5, 3)),
    "more workers than cells": ([3, 1, 0, 2], [1, 4], (1,), (2, 3)),
    "one inactive": ([3, 0, 1], [1, 3, 1], (1,), (2, 7, 2)),
    "two workers": ([1, 2], [2], (0,), (5,)),
    "one worker": ([2], [1, 1], (0,), (2, 2)),
}
every_case = pytest.mark.parametrize("workers, shape, axes, extents", CASES.values(), ids=CASES)


def outside(rank: int) -> torch.Tensor:
    return random((2, 0), seed=rank)


def dense_gather(
    workers: list[int], shape: list[int], axes: tuple[int, ...], xs: Tensors
) -> Tensors:
    """Cut the whole tensor again, along the axes that are kept only."""
    whole = assembled([xs[r] for r in workers], shape)
    kept = [1 if d in [a % len(shape) for a in axes] else n for d, n in enumerate(shape)]
    outputs = [x.clone() for x in xs]
    for rank, index in zip(workers, np.ndindex(*shape), strict=True):
        outputs[rank] = block(
            whole, kept, [i if k > 1 else 0 for i, k in zip(index, kept, strict=True)]
        )
    return outputs


def dense_scatter(
    workers: list[int], shape: list[int], axes: tuple[int, ...], xs: Tensors
) -> Tensors:
    """Sum over the axes, and keep the block along them."""
    axes = tuple(a % len(shape) for a in axes)
    grid = np.reshape(workers, shape)
    outputs = [x.clone() for x in xs]
    for index in np.ndindex(*shape):
        line = grid[tuple(slice(None) if d in axes else i for d, i in enumerate(index))]
        total = torch.stack([xs[r] for r in np.ravel(line)]).sum(0)
        along = [n if d in axes else 1 for d, n in enumerate(shape)]
        outputs[grid[index]] = block(
            total, along, [i if d in axes else 0 for d, i in enumerate(index)]
        )
    return outputs


@every_case
@distributed(ranks=4)
def test_gather(
    P_world: Partition,
    workers: list[int],
    shape: list[int],
    axes: tuple[int, ...],
    extents: tuple[int, ...],
) -> None:
    P_x = partition_of(P_world, workers, shape)

    def inputs_of(x: torch.Tensor) -> Tensors:
        parts = dict(zip(workers, blocks(x, shape), strict=True))
        return [parts.get(rank, outside(rank)) for rank in range(4)]

    numbered = inputs_of(cells(extents))
    kept = [d for d in range(len(shape)) if d not in [a % len(shape) for a in axes]]
    y = all_gather(numbered[P_world.rank], P_x, axes_keep=kept)
    assert_same(y, dense_gather(workers, shape, axes, numbered)[P_world.rank])
    layer, inputs = nn.AllGather(P_x, axes), inputs_of(random(extents))
    assert_matches_dense(layer, lambda xs: dense_gather(workers, shape, axes, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@every_case
@distributed(ranks=4)
def test_sum_scatter(
    P_world: Partition,
    workers: list[int],
    shape: list[int],
    axes: tuple[int, ...],
    extents: tuple[int, ...],
) -> None:
    P_x = partition_of(P_world, workers, shape)
    kept = [1 if d in [a % len(shape) for a in axes] else n for d, n in enumerate(shape)]
    inputs = [outside(rank) for rank in range(4)]
    for rank, index in zip(workers, np.ndindex(*shape), strict=True):
        i = [i if k > 1 else 0 for i, k in zip(index, kept, strict=True)]
        inputs[rank] = random(block(cells(extents), kept, i).shape, seed=rank)
    layer = nn.SumScatter(P_x, axes)
    x = cells(inputs[P_world.rank].shape)
    numbered = [cells(x.shape) for x in inputs]
    assert_same(layer(x), dense_scatter(workers, shape, axes, numbered)[P_world.rank])
    assert_matches_dense(layer, lambda xs: dense_scatter(workers, shape, axes, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 3, 2])
    x = cells((5, 7, 3))
    mine = local_input(x, P_x)
    whole = all_gather(mine, P_x, axes=[0, 1, 2])
    assert_same(whole, x)
    assert_same(sum_scatter(whole, P_x, axes=[0, 1, 2]), 12 * mine)
    assert_adjoint(nn.AllGather(P_x, [0, 2]), mine, P_world)


@pytest.mark.parametrize("sizes", [[5, 0, 1], [1, 1, 6]], ids=str)
@distributed(ranks=3)
def test_unbalanced_input(P_world: Partition, sizes: list[int]) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 3])
    x = cells((2, sum(sizes)))
    mine = x.split(sizes, 1)[P_world.rank]
    assert_same(all_gather(mine, P_x, [1]), x)
    assert_adjoint(nn.AllGather(P_x, [1]), mine + 1, P_world)


@distributed(ranks=3)
def test_batches_and_changed_blocks(P_world: Partition) -> None:
    """Any batch after the first agreement; a changed block only after another."""
    P_x = P_world.create_cartesian_topology_partition([1, 3])
    layer = nn.AllGather(P_x, [1])
    for batch, started in ((4, 2), (3, 1), (4, 1)):
        before = operations(P_world)
        assert_same(layer(local_input(cells((batch, 7)), P_x)), cells((batch, 7)))
        assert operations(P_world) - before == started + 1
    changed = local_input(cells((4, 8)), P_x)
    assert_same(all_gather(changed, P_x, [1], shape="dynamic"), cells((4, 8)))
    assert_same(all_gather(changed, P_x, [1], global_shape=(4, 8)), cells((4, 8)))
    with pytest.raises(PlanMismatch, match=r"\[4, 2\].*\[4, 3\]"):
        layer(changed)
        P_world.barrier()


@distributed(ranks=2)
def test_refusals(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    with pytest.raises(PartitionError, match=r"axes \[2\].*2 axes"):
        all_gather(torch.ones(2, 2), P_x, [2])
    with pytest.raises(PartitionError, match="either"):
        all_gather(torch.ones(2, 2), P_x)
    with pytest.raises(ShapeError, match=r"dim 1.*\[2, 3\] cells"):
        sum_scatter(torch.ones(2, 2 + P_world.rank), P_x, [1])
