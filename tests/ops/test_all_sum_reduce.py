"""All-sum-reduce: the same sum on every worker of a line or plane, and itself as adjoint."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import pytest
import torch

from gpudist import all_sum_reduce, nn
from gpudist.errors import PlanMismatch
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.dense import (
    Tensors,
    assert_matches_dense,
    assert_same,
    cells,
    operations,
    partition_of,
    random,
)
from tests.pool import distributed

CASES = {
    "all axes": ([0, 1, 2, 3], [2, 2], (0, 1)),
    "first axis": ([0, 1, 2, 3], [2, 2], (0,)),
    "last axis, counted from behind": ([3, 1, 0, 2], [2, 2], (-1,)),
    "an axis of one worker": ([3, 1, 0, 2], [4, 1], (1,)),
    "no axis": ([0, 1, 2, 3], [2, 2], ()),
    "three workers, one inactive": ([3, 0, 2], [3], (0,)),
    "two workers": ([2, 1], [1, 2], (1,)),
    "one worker": ([1], [1], (0,)),
}
every_case = pytest.mark.parametrize("workers, shape, axes", CASES.values(), ids=CASES.keys())


def summed_with(
    workers: list[int], shape: list[int], axes: tuple[int, ...]
) -> dict[int, list[int]]:
    """World rank -> world ranks of the workers that differ from it along ``axes`` only."""
    grid = np.reshape(workers, shape)
    groups = {}
    for index in np.ndindex(*shape):
        cut = [
            slice(None) if d in [a % len(shape) for a in axes] else i for d, i in enumerate(index)
        ]
        groups[int(grid[index])] = [int(r) for r in grid[tuple(cut)].ravel()]
    return groups


def dense_sum(groups: dict[int, list[int]], xs: Tensors) -> Tensors:
    return [
        torch.stack([xs[r] for r in groups[rank]]).sum(0) if rank in groups else x.clone()
        for rank, x in enumerate(xs)
    ]


def inputs_on(groups: dict[int, list[int]], size: int) -> Tensors:
    """Blocks that are summed have one shape, which differs from sum to sum."""
    return [random((2, 1 + min(groups.get(rank, [5]))), seed=rank) for rank in range(size)]


@every_case
@distributed(ranks=4)
def test_sums_and_derivatives(
    P_world: Partition, workers: list[int], shape: list[int], axes: tuple[int, ...]
) -> None:
    P_x = partition_of(P_world, workers, shape)
    groups = summed_with(workers, shape, axes)
    kept = [a for a in range(len(shape)) if a not in [b % len(shape) for b in axes]]
    inputs = inputs_on(groups, 4)
    x = (cells(inputs[P_world.rank].shape) + 10 * P_world.rank).requires_grad_()
    y = all_sum_reduce(x, P_x, axes_keep=kept)
    group = groups.get(P_world.rank, [P_world.rank])
    assert_same(y, len(group) * cells(x.shape) + 10 * sum(group))
    assert y.data_ptr() != x.data_ptr()
    layer = nn.AllSumReduce(P_x, axes_reduce=axes)
    assert_matches_dense(layer, lambda xs: dense_sum(groups, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    workers, shape = list(range(11, -1, -1)), [2, 3, 2]
    groups = summed_with(workers, shape, (0, 2))
    layer = nn.AllSumReduce(partition_of(P_world, workers, shape), axes_keep=[1])
    assert_matches_dense(layer, lambda xs: dense_sum(groups, xs), inputs_on(groups, 12), P_world)


@distributed(ranks=3)
def test_sums_are_bitwise_equal_and_in_rank_order(P_world: Partition) -> None:
    """Sums are equal for small tensors, and for those scattered among the workers."""
    terms = [1e16, 1.0, -1e16]
    P_x = partition_of(P_world, [2, 0, 1], [3])
    for length in (1, 5000):
        x = torch.full((length,), terms[P_x.rank], dtype=torch.float64)
        y = all_sum_reduce(x, P_x, [0], shape="dynamic")
        exact = (terms[0] + terms[1]) + terms[2]
        assert_same(y, torch.full((length,), exact, dtype=torch.float64))


@distributed(ranks=4)
def test_smaller_last_batch_and_toggled_grad(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 4])
    layer = nn.AllSumReduce(P_x, axes_reduce=[1])
    for batch, wanted, started in ((4, True, 2), (3, False, 1), (4, False, 1), (3, True, 1)):
        before = operations(P_world)
        y = layer(cells((batch, 2)).requires_grad_(wanted))
        assert operations(P_world) - before == started + 1
        assert y.requires_grad == wanted
        assert_same(y.detach(), 4 * cells((batch, 2)))


@distributed(ranks=4)
def test_blocks_of_different_shapes_are_refused_everywhere(P_world: Partition) -> None:
    """Groups whose blocks have one shape raise too."""
    P_x = P_world.create_cartesian_topology_partition([2, 2])
    x = torch.ones(2, 4 if P_world.rank == 3 else 3)
    with pytest.raises(PlanMismatch, match=r"\[2, 3\].*\[2, 4\]"):
        all_sum_reduce(x, P_x, [0])
