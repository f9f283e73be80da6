"""Sum-reduce: the sums, the copies in backward, and who takes part."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import pytest
import torch

from gpudist import nn, sum_reduce, zero_volume_tensor
from gpudist.errors import PlanMismatch
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.cases import Pair, every_pair
from tests.ops.dense import (
    Tensors,
    assert_matches_dense,
    assert_same,
    cells,
    compare_every_call,
    gathered_sources,
    operations,
    partition_of,
    random,
)
from tests.pool import distributed

BATCH = 2


def inputs_on(pair: Pair, of_cells: bool) -> Tensors:
    """Blocks that are summed have one shape, which differs from sum to sum."""
    sources = gathered_sources(*pair)
    inputs = []
    for rank in range(4):
        shape = (BATCH, 3 + sources[rank] if rank in sources else 0)
        make = cells(shape) + 100 * rank if of_cells else random(shape, seed=rank)
        inputs.append(make)
    return inputs


def dense_sum_reduce(pair: Pair, xs: Tensors) -> Tensors:
    sources = gathered_sources(*pair)
    outputs = []
    for rank, x in enumerate(xs):
        if rank in pair.coarse:
            terms = [xs[r] for r in sorted(sources) if sources[r] == rank]
            outputs.append(torch.stack(terms).sum(0))
        else:
            outputs.append(x.new_empty(BATCH, 0) if rank in sources else x.clone())
    return outputs


def layer_on(P_world: Partition, pair: Pair) -> nn.SumReduce:
    P_x = partition_of(P_world, pair.fine, pair.fine_shape)
    P_y = partition_of(P_world, pair.coarse, pair.coarse_shape)
    return nn.SumReduce(P_x, P_y)


@every_pair
@distributed(ranks=4)
def test_sums(P_world: Partition, pair: Pair) -> None:
    inputs = inputs_on(pair, of_cells=True)
    x = inputs[P_world.rank]
    before = x.clone()
    y = layer_on(P_world, pair)(x)
    assert_same(y, dense_sum_reduce(pair, inputs)[P_world.rank])
    assert_same(x, before)
    assert y.numel() == 0 or y.data_ptr() != x.data_ptr()


@every_pair
@distributed(ranks=4)
def test_derivatives(P_world: Partition, pair: Pair) -> None:
    layer = layer_on(P_world, pair)
    inputs = inputs_on(pair, of_cells=False)
    assert_matches_dense(layer, lambda xs: dense_sum_reduce(pair, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    """A [2, 3, 2] grid of all workers into a [1, 3, 1] grid of workers 4, 0, 9."""
    roots = [4, 0, 9]
    P_x = partition_of(P_world, range(12), [2, 3, 2])
    P_y = partition_of(P_world, roots, [3, 1])
    pair = Pair(tuple(roots), (1, 3, 1), tuple(range(12)), (2, 3, 2))
    sources = gathered_sources(*pair)
    inputs = [random((BATCH, 2 + sources[r]), seed=r) for r in range(12)]
    assert_matches_dense(
        nn.SumReduce(P_x, P_y), lambda xs: dense_sum_reduce(pair, xs), inputs, P_world
    )


@pytest.mark.parametrize("side", ["transpose_src", "transpose_dest"])
@distributed(ranks=12)
def test_transposed_3x4_to_4x3_pairs_equal_ranks(P_world: Partition, side: str) -> None:
    P_x = partition_of(P_world, range(12), [3, 4])
    P_y = partition_of(P_world, range(12), [4, 3])
    x = torch.full((2, 2), float(P_world.rank), dtype=torch.float64)
    layer = nn.SumReduce(P_x, P_y, **{side: True})
    assert_same(layer(x), x)
    assert_adjoint(layer, x + 1, P_world)


@pytest.mark.parametrize("preserve_batch", [True, False])
@distributed(ranks=3)
def test_zero_volume_output(P_world: Partition, preserve_batch: bool) -> None:
    P_x = P_world.create_partition_inclusive([0, 2])
    P_y = P_world.create_partition_inclusive([2])
    x = cells((5, 2)) if P_x.active else zero_volume_tensor(3)
    y = sum_reduce(x, P_x, P_y, preserve_batch=preserve_batch)
    if P_world.rank == 0:
        assert_same(y, torch.empty((5, 0) if preserve_batch else (0,), dtype=torch.float64))
    else:
        assert_same(y, 2 * cells((5, 2)) if P_y.active else torch.empty(3, 0))


@distributed(ranks=2)
def test_bool_moves_where_nothing_is_summed(P_world: Partition) -> None:
    P_y = P_world.create_partition_inclusive([1, 0])
    x = torch.tensor([[P_world.rank == 0, True]])
    assert_same(sum_reduce(x, P_world, P_y), torch.tensor([[P_world.rank == 1, True]]))


@distributed(ranks=3)
def test_sums_run_in_rank_order(P_world: Partition) -> None:
    """Addition of floats does not associate: the order is a fact, and that of the partition."""
    terms = [1e16, 1.0, -1e16]
    P_x = P_world.create_partition_inclusive([2, 0, 1])
    for root in range(3):
        y = sum_reduce(
            torch.tensor([terms[P_x.rank]], dtype=torch.float64),
            P_x,
            P_world.create_partition_inclusive([root]),
        )
        if P_world.rank == root:
            assert y.item() == (terms[0] + terms[1]) + terms[2]


@distributed(ranks=3)
def test_smaller_last_batch(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [2, 1, 1])
    P_y = P_world.create_partition_inclusive([2])
    layer = nn.SumReduce(P_x, P_y)
    for batch, started in ((4, 2), (3, 1), (4, 1), (3, 1)):
        x = cells((batch, 2)) if P_x.active else zero_volume_tensor(batch, dtype=torch.float64)
        before = operations(P_world)
        y = layer(x)
        assert operations(P_world) - before == started + 1
        if P_y.active:
            assert_same(y, 2 * cells((batch, 2)))


@distributed(ranks=2)
def test_dtype_the_receiver_cannot_know(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    P_y = P_world.create_partition_inclusive([1])
    compare_every_call(P_world)
    layer = nn.SumReduce(P_x, P_y)
    layer(torch.ones(2, 2) if P_x.active else zero_volume_tensor(2))
    # The sender may be ahead, and its refusal would end the receiver's first call.
    P_world.barrier()
    with pytest.raises(PlanMismatch, match="float64"):
        layer(torch.ones(2, 2).double() if P_x.active else zero_volume_tensor(2))
        P_world.barrier()


@distributed(ranks=4)
def test_blocks_of_different_shapes_are_refused_everywhere(P_world: Partition) -> None:
    P_x = partition_of(P_world, range(4), [2, 2])
    P_y = partition_of(P_world, [0, 1], [2, 1])
    x = torch.ones(2, 4 if P_world.rank == 3 else 3)
    with pytest.raises(PlanMismatch, match=r"ranks 2 and 3 .*\[2, 3\] and \[2, 4\]"):
        sum_reduce(x, P_x, P_y)
