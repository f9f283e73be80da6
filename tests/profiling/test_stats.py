"""``gpudist.stats`` counts what is sent, and a rehearsal predicts it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import gpudist
from gpudist.exchange import add_into, carry_out
from gpudist.ops import AllSumReduce, HaloExchange
from gpudist.profiling import Stat, Stats
from gpudist.transport.flight_recorder import FlightRecorder, Post
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.pool import distributed


def row(found: Stats, operator: str) -> Stat:
    (only,) = [stat for stat in found if stat.operator == operator]
    return only


@distributed(ranks=3)
def test_counts_of_a_halo(P_world: Partition) -> None:
    """Three blocks of 4 cells in a line: the middle one sends two messages, the others one."""
    P_x = P_world.create_cartesian_topology_partition([1, 3])
    x = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1)))
    gpudist.stats(reset=True, P_world=P_world)
    for _ in range(3):
        gpudist.halo_exchange(x, P_x, halo=((0, 0), (1, 1))).sum().backward()
    found = gpudist.stats(P_world=P_world)
    messages = 3 * (2 if P_world.rank == 1 else 1)
    for operator in ("halo_exchange", "adjoint of halo_exchange"):
        stat = row(found, operator)
        assert (stat.partition, stat.calls, stat.messages) == ("[1, 3]", 3, messages)
        assert stat.sent_bytes == stat.received_bytes == messages * 5 * 8
        assert (stat.seconds > 0) == (P_world.transport != "nccl")
    assert found.total.calls == 6 and found.total.messages == 2 * messages
    every = gpudist.stats(all_ranks=True, reset=True, P_world=P_world)
    stat = row(every, "halo_exchange")
    assert (stat.calls, stat.messages, stat.sent_bytes) == (9, 12, 12 * 40)
    assert stat.seconds >= row(found, "halo_exchange").seconds
    assert not len(gpudist.stats(P_world=P_world))


@distributed(ranks=3)
def test_a_sum_is_counted_as_the_wire_carries_it(P_world: Partition) -> None:
    """A sum is messages between all, to and from one, or a single NCCL collective."""
    P_x = P_world.create_cartesian_topology_partition([3])
    x = torch.ones(10)
    gpudist.all_sum_reduce(x, P_x, [0])
    gpudist.stats(reset=True, P_world=P_world)
    gpudist.all_sum_reduce(x, P_x, [0])
    stat = row(gpudist.stats(P_world=P_world), "all_sum_reduce over axes [0]")
    if P_world.transport == "nccl":
        assert (stat.messages, stat.sent_bytes, stat.received_bytes) == (1, 40, 40)
        return
    every = row(gpudist.stats(all_ranks=True, P_world=P_world), "all_sum_reduce over axes [0]")
    assert every.sent_bytes == every.received_bytes == 40 * every.messages
    assert every.messages == (4 if P_world.transport == "gloo" else 6)


@distributed(ranks=2, transports=("host", "loopback", "nccl"))
def test_movements_that_are_started(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2])
    exchange = HaloExchange(P_x, halo=((1, 1),), global_shape=(8,))
    movement = exchange.movement(torch.ones(4))
    gpudist.stats(reset=True, P_world=P_world)
    add_into([movement.T], [torch.ones(movement.output_shape)], [torch.ones(4)])
    stat = row(gpudist.stats(P_world=P_world), "adjoint of halo_exchange")
    assert (stat.calls, stat.messages, stat.sent_bytes, stat.received_bytes) == (1, 1, 4, 4)


@distributed(ranks=3, transports=("host",))
def test_a_large_sum_is_counted_as_it_goes(P_world: Partition) -> None:
    """Every rank adds its part and sends it on, but to a tensor that is there it adds it all."""
    P_x = P_world.create_cartesian_topology_partition([3])
    cells = 3 << 16
    movement = AllSumReduce(P_x, [0], global_shape=(3 * cells,)).movement(torch.ones(cells))
    part, whole = 4 * (cells // 3), 4 * cells
    x, there = torch.ones(cells), torch.zeros(cells)
    ways: list[tuple[Callable[[], Any], int]] = [
        (lambda: carry_out([movement], [x]), 4 * part),
        (lambda: add_into([movement], [x], [None]), 4 * part),
        (lambda: add_into([movement], [x], [there]), 2 * whole),
    ]
    for way, expected in ways:
        gpudist.stats(reset=True, P_world=P_world)
        assert way()[0][0] == 3
        stat = row(gpudist.stats(P_world=P_world), "all_sum_reduce over axes [0]")
        assert (stat.sent_bytes, stat.received_bytes) == (expected, expected)


@distributed(ranks=2, transports=("host",))
def test_a_batch_is_counted(P_world: Partition) -> None:
    gpudist.stats(reset=True, P_world=P_world)
    gpudist.broadcast_batch({"x": torch.ones(1000)} if P_world.rank == 0 else None, P_world)
    total = gpudist.stats(P_world=P_world).total
    assert (total.sent_bytes if P_world.rank == 0 else total.received_bytes) >= 4000


def test_calls_of_forgotten_activities_stay() -> None:
    recorder = FlightRecorder()
    for size_bytes in (8, 16):
        activity = recorder.new_activity("move on [2]", [Post("send", 1, size_bytes, 0)])
        recorder.end(recorder.begin(activity))
        recorder._operations.clear()
        del activity
        gc.collect()
    (totals,) = recorder.rows()
    assert (totals.calls, totals.messages, totals.sent_bytes) == (2, 2, 24)
    assert recorder.count == 2


def test_a_refused_call_is_no_operation() -> None:
    recorder = FlightRecorder()
    operation = recorder.begin(recorder.new_activity("move on [2]"))
    recorder.leave(operation)
    recorder.drop(operation)
    assert recorder.lines() == [] and recorder.count == 0


def test_the_table() -> None:
    found = Stats([Stat("b", "[2]", 1, 2, 1_500_000, 0, 0.25), Stat("a", "", 3, 4, 0, 2000, 1.0)])
    assert str(found).splitlines() == [
        "operator  partition  calls  messages  sent MB  received MB  seconds",
        "a                        3         4    0.000        0.002   1.0000",
        "b         [2]            1         2    1.500        0.000   0.2500",
        "total                    4         6    1.500        0.002   1.2500",
    ]
    assert found[0].operator == "a" and found.total.sent_bytes == 1_500_000


def test_without_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime._runtime, "P_world", None)
    with pytest.raises(gpudist.TransportError, match=r"call gpudist\.init\(\) first"):
        gpudist.stats()
