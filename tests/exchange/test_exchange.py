"""Movements: bound plans, their adjoints and compositions, and how they are carried out."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOptionalOperand=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from gpudist import ops
from gpudist.errors import PlanMismatch, ShapeError
from gpudist.exchange import add_into, all_reduce, carry, carry_out, start
from gpudist.exchange.movement import bind
from gpudist.geometry.boxes import Plan, Stage
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, blocks, cells, local_input, operations, partition_of
from tests.pool import distributed


@distributed(ranks=3)
def test_adjoint_of_the_adjoint(P_world: Partition) -> None:
    """``T.T`` is the movement itself, or its linear part where padding makes it affine."""
    P_x = P_world.create_cartesian_topology_partition([3])
    x = cells((2,))
    linear = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    assert linear.T.T is linear
    assert linear.T.identity != linear.identity
    assert (linear.T.input_shape, linear.T.output_shape) == ((4,), (2,))
    padded = ops.HaloExchange(P_x, halo=((1, 1),), padding_value=5.0).movement(x)
    assert padded.T.fill == 0.0
    assert padded.T.T.fill == 0.0
    assert padded.T.T.T is padded.T or padded.T.T.T.identity == padded.T.identity
    (y,) = carry_out([padded], [x])
    (z,) = carry_out([padded.T.T], [x])
    filled = [0] if P_world.rank == 0 else [3] if P_world.rank == 2 else []
    assert y[filled].tolist() == [5.0] * len(filled)
    assert z[filled].tolist() == [0.0] * len(filled)
    (a,) = carry_out([padded.T], [torch.ones(4).double()])
    (b,) = carry_out([linear.T], [torch.ones(4).double()])
    assert_same(a, b)


@distributed(ranks=3)
def test_composition(P_world: Partition) -> None:
    """There and back, as one movement; its adjoint is the composition of the adjoints, reversed."""
    P_x = P_world.create_cartesian_topology_partition([3, 1])
    P_y = P_world.create_cartesian_topology_partition([1, 3])
    x = local_input(cells((5, 4)), P_x)
    there = ops.Repartition(P_x, P_y).movement(x)
    halo = ops.HaloExchange(P_y, halo=((1, 0),)).movement(
        blocks(cells((5, 4)), [1, 3])[P_world.rank]
    )
    both = there.then(halo)
    (y,) = carry_out([both], [x])
    (expected,) = carry_out([halo], carry_out([there], [x]))
    assert_same(y, expected)
    gradient = cells(y.shape)
    (adjoint,) = carry_out([both.T], [gradient])
    (expected,) = carry_out([there.T], carry_out([halo.T], [gradient]))
    assert_same(adjoint, expected)


@distributed(ranks=2)
def test_movements_of_different_depth_go_together(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    x = local_input(cells((3, 4)), P_x)
    nested = ops.HaloExchange(
        P_x, halo=((1, 1), (1, 1)), nested=True, periodic=True
    ).movement(x)  # fmt: skip
    short = ops.AllGather(P_x, [1]).movement(x)
    alone = [carry_out([m], [x])[0] for m in (nested, short)]
    started = operations(P_world)
    together = carry_out([nested, short], [x, x])
    # The first stage stays on the rank along the axis of one worker, but the gather is in it.
    assert operations(P_world) - started <= 3
    for a, b in zip(alone, together, strict=True):
        assert_same(a, b)


@distributed(ranks=2, transports=["loopback"])
def test_each_stage_has_its_own_signature(P_world: Partition) -> None:
    """Every stage with a signature has its own, unlike that of any other stage."""
    P_x = P_world.create_cartesian_topology_partition([2])
    x = cells((3,))
    short = ops.AllGather(P_x, [0]).movement(x)
    halo = ops.HaloExchange(P_x, halo=((1, 1),), periodic=True).movement(x)
    both = halo.then(halo.T)
    first, second = [carry._common((short, both), depth).signature for depth in range(2)]
    assert first.label == f"{short.label} + {both.label}"
    assert second.label == both.label
    first, second = [carry._common((both,), depth).signature for depth in range(2)]
    assert first.label == second.label
    assert first.digest != second.digest


@distributed(ranks=2)
def test_what_is_bound_ends_with_its_movement(P_world: Partition) -> None:
    """Nothing else keeps it, so that shapes of one call drive out no others."""
    P_x = P_world.create_cartesian_topology_partition([2])
    x = cells((3,))
    kept, other = [ops.AllGather(P_x, [0]).movement(x) for _ in range(2)]
    for movements in ((kept,), (kept, other), (kept,)):
        carry_out(movements, [x] * len(movements))
    assert list(kept.kept) == [(), (other,)] and not other.kept
    bound = weakref.ref(kept.steps[0])
    del kept, movements
    gc.collect()
    assert bound() is None


@distributed(ranks=3)
def test_a_movement_that_has_ended_waits_for_the_others(P_world: Partition) -> None:
    """Its output passes the later stages as it is."""
    P_x = P_world.create_cartesian_topology_partition([3])
    x = cells((2,)) + P_world.rank
    short = ops.AllGather(P_x, [0]).movement(x)
    there = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    long = there.then(there.T)
    expected = [carry_out([movement], [x])[0] for movement in (short, long)]
    for order in ((0, 1), (1, 0)):
        moved = carry_out([(short, long)[i] for i in order], [x, x])
        for i, y in zip(order, moved, strict=True):
            assert_same(y, expected[i])


@distributed(ranks=2)
def test_input_must_be_what_was_bound(P_world: Partition) -> None:
    movement = ops.AllGather(P_world.create_cartesian_topology_partition([2]), [0]).movement(
        cells((3,))
    )
    for x in (cells((4,)), cells((3,), torch.float32)):
        with pytest.raises(
            ShapeError, match=r"all_gather.*torch.float64 tensor of shape \[3\], got"
        ):
            carry_out([movement], [x])
    P_world.barrier()


@distributed(ranks=2)
def test_ranks_that_carry_out_different_sets(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    x = cells((3,))
    gather = ops.AllGather(P_x, [0]).movement(x)
    halo = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    with pytest.raises(PlanMismatch, match=r"all_gather.* \+ halo_exchange"):
        if P_world.rank == 0:
            carry_out([gather, halo], [x, x])
        else:
            carry_out([gather], [x])
        P_world.barrier()


@distributed(ranks=2)
def test_conjugated_and_negated_views(P_world: Partition) -> None:
    """Lazy views are resolved before their bytes travel."""
    P_y = P_world.create_partition_inclusive([1, 0])
    z = torch.complex(cells((3,)), cells((3,)) + 1)
    for view in (z.conj(), z.conj().imag):
        assert_same(
            ops.send_recv(view, P_world, P_y, shape="dynamic"), view.resolve_conj().resolve_neg()
        )


@distributed(ranks=3)
def test_local_movements_start_no_group(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3, 1])
    x = cells((2, 4))
    movement = ops.HaloExchange(P_x, halo=((0, 0), (1, 1)), periodic=(False, True)).movement(x)
    started = operations(P_world)
    (y,) = carry_out([movement], [x])
    assert operations(P_world) - started == 1
    assert_same(y, x[:, [3, 0, 1, 2, 3, 0]])


@distributed(ranks=3)
def test_all_reduce(P_world: Partition) -> None:
    P = partition_of(P_world, [2, 0, 1], [3])
    value = torch.tensor(float(P_world.rank + 1))
    for op, expected in (("sum", 6.0), ("prod", 6.0), ("max", 3.0), ("min", 1.0)):
        assert all_reduce(value, P, op).item() == expected  # pyright: ignore[reportArgumentType]
        assert all_reduce(value.expand(1), P, op).tolist() == [expected]  # pyright: ignore[reportArgumentType]
        assert all_reduce(value.expand(4), P, op).tolist() == [expected] * 4  # pyright: ignore[reportArgumentType]
    assert value.item() == P_world.rank + 1


@distributed(ranks=3)
def test_adding_into_tensors_that_exist(P_world: Partition) -> None:
    """Two movements add to one tensor with strides of its own, another makes a new one."""
    P_x = P_world.create_cartesian_topology_partition([3, 1])
    x = cells((2, 4)) + P_world.rank
    halo = ops.HaloExchange(P_x, halo=((1, 1), (0, 0)), periodic=True).movement(x).T
    gather = ops.AllGather(P_x, [0]).movement(x)
    slab = cells((4, 4))
    expected = carry_out([halo, halo, gather], [slab, 3 * slab, x])
    there = (10 * x).t().contiguous().t()
    kept = there.clone()
    moved = add_into([halo, halo, gather], [slab, 3 * slab, x], [there, there, None])
    assert moved[0] is there and moved[1] is there and there.stride() == (1, 2)
    assert_same(there, kept + expected[0] + expected[1])
    assert_same(moved[2], expected[2])
    # The stages bound for an existing output are not those for a new one.
    assert_same(carry_out([halo], [slab])[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@distributed(ranks=3)
def test_several_sums_into_tensors_of_any_layout(P_world: Partition, dtype: torch.dtype) -> None:
    """Each is all there, whether they share a tensor, and whether that is contiguous."""
    P_x = P_world.create_cartesian_topology_partition([3, 1])
    x = cells((2, 4), dtype)
    movement = ops.HaloExchange(P_x, halo=((1, 1), (0, 0)), periodic=True).movement(x).T
    slab = torch.ones(movement.input_shape, dtype=dtype)
    (once,) = carry_out([movement], [slab])
    whole, strided = torch.ones_like(x), torch.ones(4, 2, dtype=dtype).t()
    for into in ([whole, whole], [whole, strided], [strided, strided], [strided, whole]):
        before = [y.clone() for y in into]
        times = 2 if into[0] is into[1] else 1
        moved = add_into([movement, movement], [slab, slab], into)
        for y, target, was in zip(moved, into, before, strict=True):
            assert y is target
            assert_same(y, was + times * once)


@distributed(ranks=2)
def test_a_movement_of_whole_blocks_adds_too(P_world: Partition) -> None:
    source, target = (P_world.create_partition_inclusive([rank]) for rank in (0, 1))
    x = cells((3,)) if P_world.rank == 0 else torch.empty(0).double()
    movement = ops.SendRecv(source, target).movement(x)
    there = torch.ones(3).double() if P_world.rank == 1 else None
    (y,) = add_into([movement], [x], [there])
    if P_world.rank == 1:
        assert y is there
        assert_same(y, cells((3,)) + 1)


@distributed(ranks=3)
def test_a_collective_adds_too(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3])
    x, there = cells((4,)), torch.ones(4).double()
    movement = ops.AllSumReduce(P_x, [0]).movement(x)
    (y,) = add_into([movement], [x], [there])
    assert y is there
    assert_same(there, 1 + 3 * x)


@distributed(ranks=3, transports=["host"])
def test_sums_of_several_movements_do_not_depend_on_arrival(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3])
    x = torch.randn(8)
    movements = [
        ops.HaloExchange(P_x, halo=((width, width),), periodic=True).movement(x).T
        for width in (4, 5, 6)
    ]
    slabs = [torch.randn(m.input_shape) for m in movements]
    sums = {
        tuple(add_into(movements, slabs, [total] * 3)[0].tolist())
        for total in [torch.zeros(8) for _ in range(200)]
    }
    assert len(sums) == 1


@distributed(ranks=3)
def test_sums_in_16_bit_are_rounded_once(P_world: Partition) -> None:
    """The present value and those arriving from both sides are added in float32."""
    P_x = P_world.create_cartesian_topology_partition([3])
    x = torch.full((1,), 1.0, dtype=torch.bfloat16)
    movement = ops.HaloExchange(P_x, halo=((1, 1),), periodic=True).movement(x).T
    slab = torch.full((3,), 3 / 4, dtype=torch.bfloat16)
    there = torch.full((1,), 256.0, dtype=torch.bfloat16)
    add_into([movement], [slab], [there])
    # 256 + 3/4, rounded each time, would stay 256.
    assert there.tolist() == [258.0]


@distributed(ranks=2, transports=["loopback"])
def test_adding_into_what_does_not_fit_is_refused(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    x = cells((4,))
    movement = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    elsewhere = torch.zeros(6, dtype=x.dtype, device="meta")
    for wrong in (torch.zeros(5).double(), torch.zeros(6), elsewhere):
        with pytest.raises(ShapeError, match="cannot be added to"):
            add_into([movement], [x], [wrong])
    nested = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    with pytest.raises(ShapeError, match="has 2 stages"):
        add_into([nested.then(nested.T)], [x], [torch.zeros(4).double()])


@distributed(ranks=3)
def test_started_movements_are_complete_when_waited_for(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3])
    x = cells((2,)) + P_world.rank
    movements = [
        ops.HaloExchange(P_x, halo=((1, 1),)).movement(x), ops.AllGather(P_x, [0]).movement(x),
    ]  # fmt: skip
    expected = carry_out(movements, [x, x])
    started = start(movements, [x, x])
    for i in (1, 0):
        assert_same(started.wait(i), expected[i])


@distributed(ranks=3)
def test_started_with_and_without_an_output_that_exists(P_world: Partition) -> None:
    """Calls of one movement alternate between new and existing outputs."""
    P_x = P_world.create_cartesian_topology_partition([3])
    x = cells((4,)) + P_world.rank
    movement = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x).T
    slab = cells(movement.input_shape)
    (expected,) = carry_out([movement], [slab])
    there = torch.ones(4).double()
    for times in (1, 2):
        assert_same(start([movement], [slab]).wait(0), expected)
        assert start([movement], [slab], [there]).wait(0) is there
        assert_same(there, 1 + times * expected)


@distributed(ranks=3)
def test_a_movement_that_has_no_block_here_starts_too(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([3])
    x = cells((4,))
    halo = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    plan = Plan(("nothing moves",), P_x.rank, (Stage(None, None),))
    nothing = bind(plan, P_x, "nothing moves", torch.float64, (2,), torch.float64, (0, 7))
    in_flight = start([halo, nothing], [x, cells((2,))])
    assert in_flight.wait(1).shape == (0, 7)
    assert_same(in_flight.wait(0), carry_out([halo], [x])[0])
    with pytest.raises(ShapeError, match="output of shape None cannot be added to"):
        start([nothing], [cells((2,))], [torch.zeros(0, 7).double()])


@distributed(ranks=2)
def test_a_wait_that_fails_says_so(P_world: Partition) -> None:
    """The wait raises, whether the failure is reported during the wait or before it."""
    P_x = P_world.create_cartesian_topology_partition([2])
    x = cells((3,))
    gather = ops.AllGather(P_x, [0]).movement(x)
    halo = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    with pytest.raises(PlanMismatch, match=r"all_gather") as caught:
        start([gather if P_world.rank == 0 else halo], [x]).wait(0)
    assert "halo_exchange" in str(caught.value)


@distributed(ranks=2)
def test_another_device_is_refused(P_world: Partition) -> None:
    """An address on another device is not valid here."""
    P_x = P_world.create_cartesian_topology_partition([2])
    layer = ops.AllSumReduce(P_x, [0], global_shape=(2,))
    layer(torch.ones(1))
    with pytest.raises(ShapeError, match="meta"):
        carry_out([layer.movement(torch.ones(1))], [torch.ones(1, device="meta")])
    P_world.barrier()
