"""Movements in torch.profiler, by operator and partition."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile

import gpudist
from gpudist.exchange import start
from gpudist.ops import HaloExchange
from gpudist.profiling.profiler_ranges import Ranges
from gpudist.world.partition import Partition
from tests.pool import distributed

HALO = "gpudist: halo_exchange [1, 2]"


def recorded(P_world: Partition, started: bool = False) -> list[str]:
    """Names of the ranges of a movement, in the order of their beginnings."""
    P_x = P_world.create_cartesian_topology_partition([1, 2])
    exchange = HaloExchange(P_x, halo=((0, 0), (1, 1)), global_shape=(2, 8))
    x = torch.ones(2, 4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as found:
        if started:
            movement = exchange.movement(x)
            in_flight = start([movement], [x.detach()])
            in_flight.wait(0)
        else:
            exchange(x).sum().backward()
    events = sorted(found.events() or (), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("gpudist")]


@distributed(ranks=2, transports=("host", "gloo", "nccl"))
def test_ranges_of_a_step(P_world: Partition) -> None:
    assert recorded(P_world) == []
    with gpudist.record_ranges(P_world=P_world):
        assert recorded(P_world) == [HALO, "gpudist: adjoint of halo_exchange [1, 2]"]
    assert recorded(P_world) == []
    gpudist.record_ranges(P_world=P_world)
    gpudist.record_ranges(P_world=P_world)
    assert len(recorded(P_world)) == 2
    gpudist.record_ranges(False, P_world=P_world)
    assert not any(isinstance(o, Ranges) for o in P_world.wire.recorder.observers)


@distributed(ranks=2, transports=("host",))
def test_ranges_of_what_is_started(P_world: Partition) -> None:
    with gpudist.record_ranges(P_world=P_world):
        assert recorded(P_world, started=True) == [f"{HALO} (start)", f"{HALO} (wait)"]
