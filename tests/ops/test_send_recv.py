"""Send-receive: blocks move to workers of equal rank, and gradients back."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import pytest
import torch

from gpudist import nn, send_recv, zero_volume_tensor
from gpudist.errors import PartitionError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.dense import Tensors, assert_matches_dense, assert_same, cells, partition_of, random
from tests.pool import distributed

CASES = {
    "one to one": ([0], [1]),
    "to itself": ([2], [2]),
    "swap": ([0, 1], [1, 0]),
    "chain": ([0, 1, 2], [1, 2, 3]),
    "ring": ([0, 1, 2, 3], [3, 0, 1, 2]),
    "disjoint": ([3, 0], [2, 1]),
}
every_case = pytest.mark.parametrize("ranks_x, ranks_y", CASES.values(), ids=CASES.keys())


def dense_move(ranks_x: list[int], ranks_y: list[int], xs: Tensors) -> Tensors:
    sender = dict(zip(ranks_y, ranks_x, strict=True))
    return [
        xs[sender[rank]].clone() if rank in sender
        else x.new_empty(x.shape[0], 0) if rank in ranks_x
        else x.clone()
        for rank, x in enumerate(xs)
    ]  # fmt: skip


@every_case
@distributed(ranks=4)
def test_moves_and_derivatives(P_world: Partition, ranks_x: list[int], ranks_y: list[int]) -> None:
    P_x = P_world.create_partition_inclusive(ranks_x)
    P_y = P_world.create_partition_inclusive(ranks_y)
    inputs = [random((2, 1 + r) if r in ranks_x else (2, 0), seed=r) for r in range(4)]
    numbered = [cells(x.shape) + 10 * rank for rank, x in enumerate(inputs)]
    x = numbered[P_world.rank]
    y = send_recv(x, P_x, P_y)
    assert_same(y, dense_move(ranks_x, ranks_y, numbered)[P_world.rank])
    assert y.numel() == 0 or y.data_ptr() != x.data_ptr()
    layer = nn.SendRecv(P_x, P_y)
    assert_matches_dense(layer, lambda xs: dense_move(ranks_x, ranks_y, xs), inputs, P_world)
    assert_adjoint(layer, inputs[P_world.rank], P_world)


@distributed(ranks=12)
def test_twelve_ranks(P_world: Partition) -> None:
    """A pipeline of four stages of three workers: each sends to the next."""
    P_x = partition_of(P_world, range(9), [3, 3])
    P_y = partition_of(P_world, range(3, 12), [3, 3])
    x = torch.full((1, 2), float(P_world.rank)) if P_x.active else zero_volume_tensor(1)
    y = send_recv(x, P_x, P_y)
    if P_y.active:
        assert_same(y, torch.full((1, 2), P_world.rank - 3.0))
    else:
        assert_same(y, torch.empty(1, 0))
    assert_adjoint(nn.SendRecv(P_x, P_y), x.double(), P_world)


@distributed(ranks=3)
def test_partitions_of_different_shapes_are_refused(P_world: Partition) -> None:
    P_y = P_world.create_partition_inclusive([1])
    with pytest.raises(PartitionError, match=r"\[3\].*\[1\]"):
        send_recv(torch.ones(2), P_world, P_y)
