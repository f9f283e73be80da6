"""Memory layouts, which NCCL's transport keeps: channels last stays channels last."""

from __future__ import annotations

import pytest
import torch

from gpudist import ops
from gpudist.exchange import add_into, carry_out, output_form
from gpudist.exchange.movement import bind
from gpudist.geometry.boxes import Plan, Stage
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, cells, random
from tests.pool import distributed


@distributed(ranks=3, transports=["nccl"])
@pytest.mark.parametrize("spatial", [(4, 6), (2, 3, 6)], ids=["2d", "3d"])
def test_channels_last_stays(P_world: Partition, spatial: tuple[int, ...]) -> None:
    """Outputs have their inputs' layout, and the cells they have without it."""
    dims = len(spatial)
    form = torch.channels_last if dims == 2 else torch.channels_last_3d
    P_x = P_world.create_cartesian_topology_partition([1, 1, *([1] * (dims - 1)), 3])
    x = random((2, 5, *spatial), seed=P_world.rank or 0)
    halo = ops.HaloExchange(P_x, halo=((0, 0), (0, 0), *([(0, 0)] * (dims - 1)), (1, 2)))
    root = P_world.create_partition_inclusive([0])
    for operator in (halo, ops.AllSumReduce(P_x, [dims + 1]), ops.Broadcast(root, P_world)):
        expected = operator(x)
        given = x.clone(memory_format=form).requires_grad_()
        y = operator(given)
        has_input = not isinstance(operator, ops.Broadcast) or P_world.rank == 0
        assert y.is_contiguous(memory_format=form) == has_input
        assert_same(y.detach(), expected)
        (gradient,) = torch.autograd.grad(y, given, y)
        plain = x.clone().requires_grad_()
        (as_plain,) = torch.autograd.grad(operator(plain), plain, expected)
        assert_same(gradient, as_plain)


@distributed(ranks=4, transports=["nccl", "loopback"])
def test_form_of_an_output(P_world: Partition) -> None:
    """The predicted form of an output is the form it has, over every stage."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 2])
    whole = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition([1] * 4)
    widths = ((0, 0), (0, 0), (1, 1), (2, 0))
    x = random((2, 5, 3, 4), seed=P_world.rank or 0)
    halo = ops.HaloExchange(P_x, halo=widths).movement(x)
    nested = ops.HaloExchange(P_x, halo=widths, nested=True).movement(x)
    gather = ops.AllGather(P_x, [3]).movement(x)
    everywhere = [halo, nested, nested.then(nested.T), gather, gather.then(gather.T)]
    at_root = ops.Repartition(P_x, whole).movement(x)
    back = ops.Repartition(whole, P_x)
    for form in (torch.contiguous_format, torch.channels_last):
        given = x.clone(memory_format=form)
        kept = form if P_world.wire.keeps_layout else torch.contiguous_format
        for movement in (*everywhere, at_root, at_root.then(at_root.T)):
            (y,) = carry_out([movement], [given])
            (expected,) = carry_out([movement], [x])
            assert_same(y, expected)
            is_there = movement is not at_root or P_world.rank == 0
            told = output_form(movement, given.stride())
            # Where it goes through a rank that has no block meanwhile, it comes back contiguous.
            if movement in everywhere or movement is at_root:
                assert told == (kept if is_there else torch.contiguous_format)
            assert y.stride() == torch.empty(y.shape, memory_format=told).stride()
        y = carry_out([at_root], [given])[0]
        movement = back.movement(y)
        told = output_form(movement, y.stride())
        assert told == (kept if P_world.rank == 0 else torch.contiguous_format)
        assert_same(carry_out([movement], [y])[0], x)


@distributed(ranks=2, transports=["nccl"])
def test_a_stage_to_other_dims_keeps_no_form(P_world: Partition) -> None:
    given = (1, 2, 3, 4)
    strides = torch.empty(given, memory_format=torch.channels_last).stride()
    for shape, form in (
        (given, torch.channels_last),
        ((24,), torch.contiguous_format),
        ((1, 1, 2, 3, 4), torch.contiguous_format),
    ):
        plan = Plan(("a test",), P_world.rank or 0, (Stage(given, shape),))
        movement = bind(plan, P_world, "a test", torch.float32, given, torch.float32)
        assert output_form(movement, strides) == form


@distributed(ranks=2, transports=["nccl"])
def test_what_is_added_to_keeps_its_own_layout(P_world: Partition) -> None:
    """The output keeps its layout, also if the received data has another."""
    P_x = P_world.create_cartesian_topology_partition([1, 1, 1, 2])
    x = random((2, 5, 3, 4))
    widths = ((0, 0), (0, 0), (0, 0), (1, 1))
    movement = ops.HaloExchange(P_x, halo=widths).movement(x).T
    slab = cells(movement.input_shape) + (P_world.rank or 0)
    (expected,) = carry_out([movement], [slab])
    for form in (torch.contiguous_format, torch.channels_last):
        there = torch.ones_like(x).contiguous(memory_format=form)
        strides = there.stride()
        for given in (slab, slab.contiguous(memory_format=torch.channels_last)):
            before = there.clone()
            add_into([movement], [given], [there])
            assert there.stride() == strides
            assert_same(there, before + expected)
