"""Facts known about tensors once a plan is bound to them, before anything moves."""

from __future__ import annotations

import copy

import pytest
import torch

from gpudist import ops
from gpudist.errors import ShapeError
from gpudist.exchange import carry_out, start
from gpudist.exchange.movement import bind
from gpudist.geometry.boxes import Collective, Plan, Stage
from gpudist.world.partition import Partition
from tests.ops.dense import assert_same, cells
from tests.pool import distributed

SHAPE, PLACEHOLDER = (2, 3), (7,)


@pytest.mark.parametrize("has_input", [True, False])
@pytest.mark.parametrize("has_output", [True, False])
@distributed(ranks=1, transports=["loopback"])
def test_a_rank_without_a_block(P_world: Partition, has_input: bool, has_output: bool) -> None:
    """A placeholder keeps shape and dtype; its output has no cells and the same dtype."""
    stage = Stage(SHAPE if has_input else None, SHAPE if has_output else None)
    plan = Plan(("nothing moves",), 0, (stage,))
    data, own = torch.float64, torch.int32
    given = SHAPE if has_input else PLACEHOLDER
    for empty, movement in (
        ((0,), bind(plan, P_world, "a test", data, given, own)),
        ((0, 5), bind(plan, P_world, "a test", data, given, own, (0, 5))),
    ):
        assert (movement.input_shape, movement.dtype) == (given, data)
        assert movement.output_shape == (SHAPE if has_output else empty)
        assert movement.input_dtype == (data if has_input else own)
        assert movement.output_dtype == (data if has_output else own)
        (y,) = carry_out([movement], [torch.zeros(given, dtype=movement.input_dtype)])
        assert (y.shape, y.dtype) == (movement.output_shape, movement.output_dtype)
        back = movement.T
        assert (back.input_shape, back.output_shape) == (movement.output_shape, given)
        assert (back.input_dtype, back.output_dtype) == (y.dtype, movement.input_dtype)


@pytest.mark.parametrize(
    ("adding", "adds"),
    [
        (Stage(SHAPE, SHAPE, destinations_overlap=True), True),
        (Stage(SHAPE, SHAPE, collectives=(Collective("all_reduce", (0, 1), 0, True),)), True),
        (Stage(SHAPE, SHAPE, collectives=(Collective("broadcast", (0, 1), 0, True),)), False),
    ],
)
@distributed(ranks=2, transports=["loopback"])
def test_truth_values_have_no_sum(P_world: Partition, adding: Stage, adds: bool) -> None:
    """Whichever stage it is that adds."""
    copying = Stage(SHAPE, SHAPE)
    for stages in ((adding, copying), (copying, adding)):
        plan = Plan(("a test",), P_world.rank or 0, stages)
        bind(plan, P_world, "a test", torch.int8, SHAPE, torch.int8)
        if not adds:
            bind(plan, P_world, "a test", torch.bool, SHAPE, torch.bool)
            continue
        with pytest.raises(ShapeError, match=r"a test: torch\.bool has no sum"):
            bind(plan, P_world, "a test", torch.bool, SHAPE, torch.bool)


@distributed(ranks=2, transports=["loopback"])
def test_a_movement_in_words(P_world: Partition) -> None:
    """An adjoint does not print what it is the adjoint of once more."""
    P_x = P_world.create_cartesian_topology_partition([2])
    adjoint = ops.AllGather(P_x, [0]).movement(cells((3,))).T
    assert repr(adjoint).count("adjoint of") == 1 and "_forward" not in repr(adjoint)


@distributed(ranks=2)
def test_copies_of_layers_share_movements(P_world: Partition) -> None:
    """Also after they were carried out and started, when they keep what the transport bound."""
    P_x = P_world.create_cartesian_topology_partition([2])
    x = cells((3,))
    movement = ops.HaloExchange(P_x, halo=((1, 1),)).movement(x)
    (y,) = carry_out([movement], [x])
    start([movement], [x]).wait(0)
    copied = copy.deepcopy({"layer": movement})["layer"]
    assert_same(carry_out([copied], [x])[0], y)
