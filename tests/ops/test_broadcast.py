"""Broadcast: the copies, the sum in backward, and who takes part."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gpudist import broadcast, nn, zero_volume_tensor
from gpudist.errors import PlanMismatch
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.cases import Pair, every_pair
from tests.ops.dense import (
    Tensors,
    assert_matches_dense,
    assert_same,
    cells,
    gathered_sources,
    operations,
    partition_of,
    random,
)
from tests.pool import distributed

BATCH = 2


def shape_on(rank: int) -> tuple[int, ...]:
    """Blocks of different sizes on different workers."""
    return (BATCH, 3 + rank)


def inputs_on(pair: Pair) -> Tensors:
    return [
        random(shape_on(rank), seed=rank) if rank in pair.coarse else torch.empty(BATCH, 0).double()
        for rank in range(4)
    ]


def dense_broadcast(pair: Pair, xs: Tensors) -> Tensors:
    sources = gathered_sources(*pair)
    outputs = []
    for rank, x in enumerate(xs):
        if rank in sources:
            outputs.append(xs[sources[rank]].clone())
        else:
            outputs.append(x.new_empty(BATCH, 0) if rank in pair.coarse else x.clone())
    return outputs


def layer_on(P_world: Partition, pair: Pair, **kwargs: Any) -> nn.Broadcast:
    P_x = partition_of(P_world, pair.coarse, pair.coarse_shape)
    P_y = partition_of(P_world, pair.fine, pair.fine_shape)
    return nn.Broadcast(P_x, P_y, **kwargs)


@every_pair
@distributed(ranks=4)
def test_copies(P_world: Partition, pair: Pair) -> None:
    layer = layer_on(P_world, pair)
    inputs = [
        cells(shape_on(rank)) + 100 * rank if rank in pair.coarse else torch.empty(BATCH, 0)
        for rank in range(4)
    ]
    x = inputs[P_world.rank]
    before = x.clone()
    y = layer(x)
    source = gathered_sources(*pair).get(P_world.rank)
    if source is not None:
        assert_same(y, inputs[source])
    elif layer.P_x.active:
        assert_same(y, x.new_empty(BATCH, 0))
    else:
        assert_same(y, x)
    assert_same(x, before)
    assert y.numel() == 0 or y.data_ptr() != x.data_ptr()


@every_pair
@distributed(ranks=4)
def test_derivatives(P_world: Partition, pair: Pair) -> None:
    layer = layer_on(P_world, pair)
    inputs = inputs_on(pair)
    assert_matches_dense(layer, lambda xs: dense_broadcast(pair, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    """A [1, 3, 1] grid of workers 4, 0, 9 over a [2, 3, 2] grid of all."""
    roots = [4, 0, 9]
    P_x = partition_of(P_world, roots, [3, 1])
    P_y = partition_of(P_world, range(12), [2, 3, 2])
    sources = gathered_sources(roots, [1, 3, 1], range(12), [2, 3, 2])
    inputs = [random((2, 2 + r), seed=r) if r in roots else random((2, 0)) for r in range(12)]
    layer = nn.Broadcast(P_x, P_y)
    assert_matches_dense(
        layer, lambda xs: [xs[sources[r]].clone() for r in range(12)], inputs, P_world
    )


@pytest.mark.parametrize("side", ["transpose_src", "transpose_dest"])
@distributed(ranks=12)
def test_transposed_3x4_to_4x3_pairs_equal_ranks(P_world: Partition, side: str) -> None:
    P_x = partition_of(P_world, range(12), [3, 4])
    P_y = partition_of(P_world, range(12), [4, 3])
    layer = nn.Broadcast(P_x, P_y, **{side: True})
    x = torch.full((2, 2), float(P_world.rank), dtype=torch.float64)
    y = layer(x)
    # Column-major over the reversed index is the rank itself.
    assert_same(y, x)
    assert_adjoint(layer, x + 1, P_world)


@distributed(ranks=4)
def test_transposed_along_one_axis(P_world: Partition) -> None:
    """A row of workers becomes a column: only one axis matches, so NumPy's transpose agrees."""
    P_x = partition_of(P_world, [2, 0], [1, 2])
    P_y = partition_of(P_world, range(4), [2, 2])
    sources = np.broadcast_to(np.array([[2, 0]]).T, (2, 2)).ravel()
    x = cells((1, 2)) + 10 * P_world.rank if P_x.active else zero_volume_tensor(1)
    y = broadcast(x, P_x, P_y, transpose_src=True)
    assert_same(y, cells((1, 2)) + 10 * int(sources[P_world.rank]))


@pytest.mark.parametrize("preserve_batch", [True, False])
@distributed(ranks=3)
def test_zero_volume_output(P_world: Partition, preserve_batch: bool) -> None:
    """The source alone gets an empty tensor of its own dtype; who is in neither, a clone."""
    P_x = P_world.create_partition_inclusive([0])
    P_y = P_world.create_partition_inclusive([1])
    layer = nn.Broadcast(P_x, P_y, preserve_batch=preserve_batch)
    x = cells((5, 2)) if P_x.active else zero_volume_tensor(3, dtype=torch.float32)
    y = layer(x)
    if P_world.rank == 0:
        assert_same(y, torch.empty((5, 0) if preserve_batch else (0,), dtype=torch.float64))
    elif P_world.rank == 1:
        assert_same(y, cells((5, 2)))
    else:
        assert_same(y, torch.empty(3, 0))


@distributed(ranks=3)
def test_identity_is_a_new_tensor(P_world: Partition) -> None:
    x = cells((2, 3)).requires_grad_()
    y = broadcast(x, P_world, P_world)
    assert_same(y, x)
    assert y.data_ptr() != x.data_ptr()
    gradient = cells((2, 3))
    (adjoint,) = torch.autograd.grad(y, x, gradient)
    assert_same(adjoint, gradient)
    assert adjoint.data_ptr() != gradient.data_ptr()


@distributed(ranks=4)
def test_overlapping_partitions_made_in_different_orders(P_world: Partition) -> None:
    """Creating partitions needs no agreement, and crossing movements no order but the program's."""
    lists = [[3, 0, 2], [0, 3], [2, 1, 0], [1, 3, 2, 0], [0, 1], [1, 0]]
    order = lists[P_world.rank :] + lists[: P_world.rank]
    made = {tuple(ranks): P_world.create_partition_inclusive(ranks) for ranks in order}
    for ranks in lists:
        P_y = made[tuple(ranks)]
        for root in range(P_y.size):
            P_x = P_y.create_partition_inclusive([root])
            x = torch.full((2, 2), 1.0 + ranks[root]) if P_x.active else zero_volume_tensor(2)
            y = broadcast(x.requires_grad_(), P_x, P_y)
            if P_y.active:
                assert_same(y.detach(), torch.full((2, 2), 1.0 + ranks[root]))
            y.sum().backward()
            if P_x.active:
                assert_same(x.grad, torch.full((2, 2), float(len(ranks))))


@distributed(ranks=3)
def test_toggling_requires_grad_agrees_once(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([1])
    layer = nn.Broadcast(P_x, P_world)
    calls: list[Any] = []
    gather = layer.P_all.allgather_data
    layer.P_all.allgather_data = lambda data: (calls.append(data), gather(data))[1]
    x = cells((2, 3)) if P_x.active else zero_volume_tensor(2, dtype=torch.float64)
    for wanted in (True, False, True, False):
        x = x.detach().requires_grad_(wanted)
        y = layer(x)
        assert y.requires_grad == wanted
        assert_same(y.detach(), cells((2, 3)))
        if wanted:
            y.sum().backward()
    with torch.no_grad():
        assert not layer(x.requires_grad_()).requires_grad
    assert len(calls) == 1


@distributed(ranks=3)
def test_smaller_last_batch_is_learnt_from_the_placeholder(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    layer = nn.Broadcast(P_x, P_world.create_cartesian_topology_partition([3, 1]))
    for batch in (4, 1, 4):
        mine = cells((batch, 2)) if P_x.active else zero_volume_tensor(batch, dtype=torch.float64)
        if batch == 4:
            started = operations(P_world)
            y = layer(mine)
            # The first call agrees and moves; later ones only move.
            assert operations(P_world) - started <= 3
        else:
            started = operations(P_world)
            y = layer(mine)
            assert operations(P_world) - started == 2
        assert_same(y, cells((batch, 2)))


@distributed(ranks=2)
def test_placeholder_without_a_batch_means_as_agreed(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    layer = nn.Broadcast(P_x, P_world.create_cartesian_topology_partition([2, 1]))
    for _ in range(2):
        assert_same(layer(cells((4, 2)) if P_x.active else torch.empty(0)), cells((4, 2)))


@distributed(ranks=3)
def test_changed_block_is_refused_everywhere(P_world: Partition) -> None:
    """P_x has one axis, which is the tensor's last: the workers along it must agree on that dim."""
    P_x = P_world.create_partition_inclusive([0, 1])
    P_y = partition_of(P_world, [2, 1], [2])
    layer = nn.Broadcast(P_x, P_y)
    layer(cells((2, 3)) if P_x.active else zero_volume_tensor(2))
    P_world.barrier()
    changed = cells((2, 4 if P_world.rank == 0 else 3)) if P_x.active else zero_volume_tensor(2)
    with pytest.raises(PlanMismatch, match=r"\[2, 3\].*\[2, 4\].*shape='dynamic'"):
        layer(changed)
        P_world.barrier()


@distributed(ranks=3)
def test_dynamic_shapes(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    for shape, dtype in (((2, 3), torch.float32), ((1, 5, 2), torch.float64), ((4,), torch.int64)):
        x = cells(shape, dtype) if P_x.active else zero_volume_tensor()
        assert_same(broadcast(x, P_x, P_world, shape="dynamic"), cells(shape, dtype))


@distributed(ranks=3)
def test_global_shape_saves_the_agreement(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    P_y = P_world.create_cartesian_topology_partition([3, 1])
    x = cells((4, 2)) if P_x.active else zero_volume_tensor(4, dtype=torch.float64)
    started = operations(P_world)
    y = broadcast(x, P_x, P_y, global_shape=(4, 2))
    assert operations(P_world) - started == 2
    assert_same(y, cells((4, 2)))


@distributed(ranks=2)
def test_scalars_and_empty_blocks(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    for value in (torch.tensor(7.0), torch.empty(0, 3), torch.empty(2, 0, 4)):
        x = value if P_x.active else zero_volume_tensor()
        assert_same(broadcast(x, P_x, P_world, shape="dynamic"), value)
