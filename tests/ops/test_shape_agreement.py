"""Agreement of ranks on shapes: what they agree on, when they communicate, what they refuse."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpudist import nn, ops, zero_volume_tensor
from gpudist.errors import PlanMismatch, ShapeError
from gpudist.ops.shape_agreement import ShapeAgreement
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world.partition import Partition
from gpudist.world.runtime import world_of
from tests.ops.dense import operations, partition_of
from tests.pool import distributed


@distributed(ranks=3)
def test_agrees_once_and_adapts_alone(P_world: Partition) -> None:
    P_x = partition_of(P_world, [0, 1], [1, 2])
    agreement = ShapeAgreement("Test", P_x, P_world, None)
    first = agreement(torch.ones(4, 3 + P_world.rank) if P_x.active else zero_volume_tensor(4))
    assert [first.shape_of(rank) for rank in range(2)] == [(4, 3), (4, 4)]
    assert first.dtype == torch.float32
    assert first.decomposition.shape == (4, 7)
    before = operations(P_world)
    smaller = torch.ones(2, 3 + P_world.rank) if P_x.active else zero_volume_tensor(2)
    second = agreement(smaller)
    assert operations(P_world) - before == 1
    assert [second.shape_of(rank) for rank in range(2)] == [(2, 3), (2, 4)]
    assert agreement(torch.ones(4, 3 + P_world.rank) if P_x.active else torch.empty(0)) is first


@distributed(ranks=2)
def test_every_rank_sees_a_new_dtype_of_its_own_block(P_world: Partition) -> None:
    agreement = ShapeAgreement("Test", P_world, P_world, 1)
    agreement(torch.ones(3))
    assert agreement(torch.ones(3).double()).dtype == torch.float64


@pytest.mark.parametrize(
    "changed",
    [torch.ones(4, 2).double(), torch.ones(4, 3), torch.ones(0, 2)],
    ids=["dtype", "width", "no cells"],
)
@distributed(ranks=3)
def test_refuses_what_no_placeholder_tells(P_world: Partition, changed: torch.Tensor) -> None:
    """Refused by the owner itself: no message of the operator could tell the others in time."""
    P_x = partition_of(P_world, [1], [1, 1])
    agreement = ShapeAgreement("Test", P_x, P_world, None)
    # The whole loop, since a slow rank may detect the change during its agreement.
    with pytest.raises(PlanMismatch, match=r"\[4, 2\] and is now .*shape='dynamic'"):
        agreement(torch.ones(4, 2) if P_x.active else zero_volume_tensor(4))
        agreement(changed if P_x.active else zero_volume_tensor(4))
        P_world.barrier()


@distributed(ranks=2)
def test_dynamic_agrees_at_every_call(P_world: Partition) -> None:
    agreement = ShapeAgreement("Test", P_world, P_world, 1, shape="dynamic")
    for extent in (3, 3, 5):
        before = operations(P_world)
        assert agreement(torch.ones(extent)).decomposition.shape == (2 * extent,)
        assert operations(P_world) - before == 2


@distributed(ranks=3)
def test_global_shape_needs_no_agreement(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 3])
    agreement = ShapeAgreement("Test", P_x, P_world, 2, global_shape=(2, 7))
    mine = [3, 2, 2][P_world.rank]
    before = operations(P_world)
    assert agreement(torch.ones(2, mine)).decomposition.shape == (2, 7)
    assert agreement(torch.ones(5, mine)).decomposition.shape == (5, 7)
    assert operations(P_world) - before == 1


@distributed(ranks=2)
def test_blocks_that_do_not_fit_the_global_shape(P_world: Partition) -> None:
    """One rank refuses its block, and its peers raise too."""
    agreement = ShapeAgreement("Test", P_world, P_world, 1, global_shape=(5,))
    words = r"Test, rank 0 .*got \[2\], another block; .* shape \[5\] is \[3\]: pass the"
    with pytest.raises(ShapeError, match=words):
        agreement(torch.ones(2))
        P_world.barrier()


@distributed(ranks=2)
def test_whole_tensor_in_place_of_a_block(P_world: Partition) -> None:
    """Here rank 0's block is the whole, so that it does not know."""
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    agreement = ShapeAgreement("Test", P_x, P_x, 2, global_shape=(2, 1))
    words = r"rank 1 .*got \[2, 1\], the whole tensor; .* is \[2, 0\]: was scatter forgotten\?"
    with pytest.raises(ShapeError, match=words):
        agreement(torch.ones(2, 1))
        P_world.barrier()


@distributed(ranks=2)
def test_global_shape_in_another_order(P_world: Partition) -> None:
    agreement = ShapeAgreement("Test", P_world.grid(1, 2), P_world, 2, global_shape=(6, 4))
    with pytest.raises(
        ShapeError, match=r"got \[4, 3\], another .* is \[6, 2\]: .* as \[4, 6\] are"
    ):
        agreement(torch.ones(4, 3))
        P_world.barrier()


def test_global_shape_that_may_change_is_refused() -> None:
    P_world = world_of(LoopbackTransport.single())
    with pytest.raises(ShapeError, match=r"Broadcast: global_shape=\[2\] and shape='dynamic'"):
        nn.Broadcast(P_world, P_world, global_shape=[2], shape="dynamic")


@pytest.mark.parametrize("named", [True, False])
@distributed(ranks=2)
def test_wrong_dims_and_device(P_world: Partition, named: bool) -> None:
    """Every rank raises: at once if they agree, otherwise at the next message."""
    known: dict[str, Any] = {"global_shape": (2, 2)} if named else {}
    agreement = ShapeAgreement("Test", P_world, P_world, 2, **known)
    bad = P_world.rank == 1
    if bad or not named:
        with pytest.raises(ShapeError, match=r"rank 1 .*\[2, 1, 1\] has 3 dims, not 2"):
            agreement(torch.ones(2, 1, 1) if bad else torch.ones(2, 1))
    if named:
        with pytest.raises(PlanMismatch):
            P_world.barrier()


def test_shape_mode_is_checked() -> None:
    P_world = world_of(LoopbackTransport.single())
    with pytest.raises(ShapeError, match=r"'often'.*'static' or 'dynamic'"):
        nn.Broadcast(P_world, P_world, shape="often")  # pyright: ignore[reportArgumentType]


@distributed(ranks=2)
def test_functions_agree_once_for_equal_arguments(P_world: Partition) -> None:
    """A function creates one operator for equal arguments, and finds it again."""
    x = torch.ones(2, 2)
    for expected in (2, 1, 1):
        before = operations(P_world)
        P_x = P_world.create_partition_inclusive([1, 0])
        ops.send_recv(x, P_x, P_world)
        assert operations(P_world) - before == expected + 1


@distributed(ranks=2)
def test_many_shapes_stay_correct(P_world: Partition) -> None:
    """More batches than an operator remembers."""
    P_y = P_world.create_partition_inclusive([1, 0])
    layer = nn.SendRecv(
        P_world.create_cartesian_topology_partition([2, 1, 1]),
        P_y.create_cartesian_topology_partition([2, 1, 1]),
    )
    for batch in range(1, 300):
        y = layer(torch.full((1, batch, 1), float(P_world.rank)))
        assert torch.equal(y, torch.full((1, batch, 1), 1.0 - P_world.rank))
