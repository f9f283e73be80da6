"""Ranks that disagree: ``PlanMismatch`` on all of them, with both versions in the message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gpudist import all_sum_reduce, broadcast, halo_exchange
from gpudist.errors import PlanMismatch
from gpudist.exchange import bind, carry_out
from gpudist.geometry import Decomposition, Halo, HaloWidths, plan_halo
from gpudist.world.partition import CartesianPartition, Partition
from tests.pool import distributed

RANKS = 3
over_host = distributed(RANKS, transports=("host",))


def line(P_world: Partition) -> CartesianPartition:
    return P_world.create_cartesian_topology_partition([P_world.size])


def assert_refused_everywhere(
    P_world: Partition, disagree: Callable[[bool], object], *views: str
) -> None:
    """``disagree(odd)``, with rank 1 the odd one, is an error on all, which shows these views."""
    P_line = line(P_world)
    x = torch.zeros(2)
    halo_exchange(x, P_line, halo=[(1, 1)], global_shape=[2 * RANKS])
    with pytest.raises(PlanMismatch) as caught:
        disagree(P_world.rank == 1)
        # Whoever has sent all and received all learns of it with the next operation.
        for _ in range(2):
            all_sum_reduce(x, P_line, axes_reduce=[0], global_shape=[2])
    text = str(caught.value)
    assert "ranks disagree about" in text
    for view in views:
        assert view in text


def exchange_halo(
    P_line: CartesianPartition, cells: int = 4, width: int = 1, dtype: torch.dtype = torch.float32
) -> None:
    """A plan made on this rank alone: nobody is asked before the first message."""
    assert P_line.index is not None
    inputs = Decomposition.balanced([cells * P_line.size], P_line.shape)
    plan = plan_halo(inputs, Halo((HaloWidths(width, width),)), P_line.index)
    x = torch.zeros(cells, dtype=dtype)
    label = f"halo of {width} in {cells * P_line.size}"
    carry_out([bind(plan, P_line, label, dtype, x.shape, dtype)], [x])


@over_host
def test_another_shape(P_world: Partition) -> None:
    assert_refused_everywhere(
        P_world,
        lambda odd: exchange_halo(line(P_world), cells=5 if odd else 4),
        "'halo of 1 in 12 of torch.float32'",
        "'halo of 1 in 15 of torch.float32'",
    )


@over_host
def test_another_size_of_the_message(P_world: Partition) -> None:
    assert_refused_everywhere(
        P_world,
        lambda odd: exchange_halo(line(P_world), width=2 if odd else 1),
        "'halo of 1 in 12 of torch.float32'",
        "'halo of 2 in 12 of torch.float32'",
        " of 4 bytes",
        " of 8 bytes",
    )


@over_host
def test_another_dtype(P_world: Partition) -> None:
    # The dtypes have one width, so the number of bytes would fit.
    assert_refused_everywhere(
        P_world,
        lambda odd: exchange_halo(line(P_world), dtype=torch.int32 if odd else torch.float32),
        "of torch.int32'",
        "of torch.float32'",
        " of 4 bytes",
    )


@over_host
def test_another_operator(P_world: Partition) -> None:
    # Rank 1 only receives, so that it alone can notice, and with this operation.
    P_line, P_root = line(P_world), P_world.create_partition_inclusive([0])
    x = torch.zeros(4)

    def disagree(odd: bool) -> None:
        if odd:
            broadcast(x, P_root, P_world, global_shape=[4])
        else:
            halo_exchange(x, P_line, halo=[(1, 1)], global_shape=[4 * RANKS])

    assert_refused_everywhere(P_world, disagree, "'broadcast [1] -> [3]", "'halo_exchange on [3]")


@over_host
def test_another_order_of_calls(P_world: Partition) -> None:
    P_line = line(P_world)
    calls = [
        lambda: exchange_halo(P_line),
        lambda: all_sum_reduce(torch.zeros(1), P_line, axes_reduce=[0], global_shape=[1]),
    ]

    def disagree(odd: bool) -> None:
        for call in reversed(calls) if odd else calls:
            call()

    assert_refused_everywhere(
        P_world, disagree, "'all_sum_reduce over axes [0]", "'halo of 1 in 12"
    )


@over_host
def test_one_operation_left_out(P_world: Partition) -> None:
    P_line = line(P_world)

    def disagree(odd: bool) -> None:
        if not odd:
            exchange_halo(P_line, width=2)
        exchange_halo(P_line)

    assert_refused_everywhere(P_world, disagree, "'halo of 1 in 12", "'halo of 2 in 12")


@over_host
def test_the_adjoint_instead(P_world: Partition) -> None:
    P_line = line(P_world)
    inputs = Decomposition.balanced([12], [RANKS])
    plan = plan_halo(inputs, Halo((HaloWidths(1, 1),)), P_line.index or (0,))
    movement = bind(plan, P_line, "a halo", torch.float32, (4,), torch.float32)

    def disagree(odd: bool) -> None:
        chosen = movement.T if odd else movement
        carry_out([chosen], [torch.zeros(chosen.input_shape)])

    assert_refused_everywhere(P_world, disagree, "'adjoint of a halo of", "'a halo of")
