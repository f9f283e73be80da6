"""Under run-time shapes an output requires grad because the owners' blocks do, not placeholders."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import pytest
import torch

from gpudist import nn, zero_volume_tensor
from gpudist.errors import PlanMismatch, ShapeError
from gpudist.testing import assert_adjoint
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, cells, partition_of, random
from tests.pool import distributed


@pytest.mark.parametrize("placeholder", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("says", [True, False])
@distributed(ranks=3)
def test_the_source_leads(P_world: Partition, placeholder: torch.dtype, says: bool) -> None:
    """The source decides: if one rank skipped backward, others would wait for it."""
    P_x = P_world.create_partition_inclusive([0])
    layer = nn.Broadcast(P_x, P_world, shape="dynamic")
    for wanted in (True, False, True):
        x = random((2, 3), seed=1) if P_x.active else zero_volume_tensor(dtype=placeholder)
        x.requires_grad_(wanted if P_x.active else says and placeholder.is_floating_point)
        y = layer(x)
        assert y.requires_grad == wanted
        if wanted:
            y.backward(torch.full((2, 3), 1.0 + P_world.rank).double())
        if P_x.active and wanted:
            assert_same(x.grad, torch.full((2, 3), 6.0).double())
        with torch.no_grad():
            assert not layer(x).requires_grad


@distributed(ranks=3)
def test_a_placeholder_that_wants_its_gradient_gets_one(P_world: Partition) -> None:
    P_x = P_world.create_partition_inclusive([0])
    layer = nn.Broadcast(P_x, P_world, shape="dynamic")
    x = random((2, 3)) if P_x.active else zero_volume_tensor(5)
    x.requires_grad_()
    layer(x).sum().backward()
    if not P_x.active:
        assert_same(x.grad, torch.empty(5, 0))


@distributed(ranks=3)
def test_one_summand_wants_a_gradient(P_world: Partition) -> None:
    layer = nn.SumReduce(P_world, P_world.create_partition_inclusive([1]), shape="dynamic")
    x = random((2, 2), seed=P_world.rank).requires_grad_(P_world.rank == 2)
    y = layer(x)
    assert y.requires_grad
    y.sum().backward()
    if P_world.rank == 2:
        assert_same(x.grad, torch.ones(2, 2).double())
    else:
        assert x.grad is None


@distributed(ranks=4)
def test_gathers_for_a_plain_placeholder(P_world: Partition) -> None:
    """Every other operator: what any owner wants, all take part in."""
    P_x = partition_of(P_world, [0, 1], [2, 1])
    P_y = partition_of(P_world, [2, 3], [1, 2])
    layer = nn.Repartition(P_x, P_y, shape="dynamic")
    x = cells((2, 4)).requires_grad_() if P_x.active else zero_volume_tensor()
    y = layer(x)
    assert y.requires_grad
    y.backward(torch.full(y.shape, 3.0).double())
    if P_x.active:
        assert_same(x.grad, torch.full((2, 4), 3.0).double())


@distributed(ranks=2)
def test_who_sends_and_gets_needs_both_alike(P_world: Partition) -> None:
    P_y = P_world.create_partition_inclusive([1, 0])
    layer = nn.SendRecv(P_world, P_y, shape="dynamic")
    assert_same(layer(cells((2, 1 + P_world.rank))), cells((2, 2 - P_world.rank)))
    with pytest.raises(PlanMismatch, match=r"requires_grad is (True|False)"):
        layer(random((2, 2)).requires_grad_(P_world.rank == 0))
        P_world.barrier()


@distributed(ranks=2)
def test_dtypes_of_who_sends_and_gets(P_world: Partition) -> None:
    P_y = P_world.create_partition_inclusive([1, 0])
    layer = nn.SendRecv(P_world, P_y, shape="dynamic")
    with pytest.raises(PlanMismatch, match=r"dtype is torch\.(float32|int64)"):
        layer(torch.ones(2, dtype=torch.int64 if P_world.rank == 0 else torch.float32))
        P_world.barrier()


@distributed(ranks=4)
def test_pairs_of_their_own(P_world: Partition) -> None:
    """Blocks that do not overlap may differ in every property."""
    P_x = P_world.create_partition_inclusive([0, 1])
    P_y = P_world.create_partition_inclusive([2, 3])
    layer = nn.SendRecv(P_x, P_y, shape="dynamic")
    blocks = [cells((2, 3), torch.float32), cells((4,), torch.int64)]
    y = layer(blocks[P_world.rank] if P_x.active else zero_volume_tensor())
    if P_y.active:
        assert_same(y, blocks[P_world.rank - 2])


@distributed(ranks=3)
def test_a_source_that_cannot_be_moved(P_world: Partition) -> None:
    layer = nn.Broadcast(P_world.create_partition_inclusive([0]), P_world, shape="dynamic")
    bad = torch.ones(2, device="meta") if P_world.rank == 0 else zero_volume_tensor()
    with pytest.raises(ShapeError, match=r"rank 0 .*meta.*cpu; move it"):
        layer(bad)


@distributed(ranks=4)
def test_adjoint(P_world: Partition) -> None:
    P_x = partition_of(P_world, [3, 1], [2, 1])
    layer = nn.Broadcast(P_x, partition_of(P_world, range(4), [2, 2]), shape="dynamic")
    for seed in range(2):
        shape = (2 + seed, 3 + P_world.rank)
        x = random(shape, seed) if P_x.active else torch.empty(0).double()
        assert_adjoint(layer, x, P_world)
