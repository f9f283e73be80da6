"""Ends of worlds with threads inside NCCL, graphs alive and kernels queued, over the doubles."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from gpudist import ops, runtime
from gpudist.errors import PeerFailure, TransportError
from gpudist.exchange import InFlight, carry, start
from gpudist.partition import Partition
from gpudist.transport.base import Transport
from gpudist.transport.failure import Failure
from gpudist.transport.nccl import NcclTransport
from tests.doubles.graphs import Graph
from tests.doubles.nccl import clear, configure, count, inject, violations
from tests.patience import allowed_s
from tests.transport.mortals import Mortals
from tests.transport.nccl_actions import Fate, block_of, fate_of, halo, halo_of

RANKS = 2
GRID = 4
LONG_S = 20.0
# What close() waits for peers and graphs.
CLOSING_S = 5.0


@pytest.fixture(scope="module")
def mortals() -> Iterator[Mortals]:
    ranks = Mortals(GRID)
    yield ranks
    ranks.kill()


def started_halo(P_world: Partition, factor: float = 1.0) -> InFlight:
    x = block_of(P_world) * factor
    return start([halo_of(P_world).movement(x)], [x])


def let_go(in_flight: list[InFlight]) -> None:
    """Wait for each, in a world that has failed."""
    for one in in_flight:
        with pytest.raises(TransportError):
            one.wait(0)


def give_up(transport: Transport) -> None:
    transport.abort(Failure("TransportError", transport.rank, f"rank {transport.rank} gives up"))


def close(transport: Transport) -> float:
    begin_s = time.monotonic()
    transport.close()
    return time.monotonic() - begin_s


def fail_with_a_graph(transport: Transport) -> Fate:
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world)
    with Graph() as graph:
        y = halo(P_world)
    graph.launch()
    assert torch.equal(y, expected)
    if transport.rank == 1:
        give_up(transport)

    def go_on() -> None:
        while True:
            halo(P_world)

    fate = fate_of(transport, go_on)
    graph.destroy()
    time.sleep(0.2)
    fate.misuses += violations()
    return fate


def test_failure_while_a_graph_is_alive(mortals: Mortals) -> None:
    """NCCL frees nothing before the graph goes, and nobody waits for that."""
    for fate in mortals.run(RANKS, fail_with_a_graph, timeout_s=LONG_S):
        assert isinstance(fate.error, TransportError) and "gives up" in str(fate.error), fate
        assert isinstance(fate.later, TransportError), fate
        assert fate.after_s < allowed_s(2.0), fate
        assert fate.closing_s < allowed_s(CLOSING_S + 1.0), fate
        assert fate.misuses == []


def close_with_a_graph(transport: Transport) -> tuple[float, list[str]]:
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    with Graph() as graph:
        halo(P_world)
    graph.launch()
    transport.wait()
    closing_s = close(transport)
    graph.destroy()
    time.sleep(0.2)
    return closing_s, violations()


def test_close_while_a_graph_is_alive(mortals: Mortals) -> None:
    """The communicator is left to the graph: never aborted while it is being finalized."""
    for closing_s, misuses in mortals.run(RANKS, close_with_a_graph, timeout_s=LONG_S):
        assert closing_s < allowed_s(CLOSING_S + 1.0)
        assert misuses == []


def connect_to_the_dead(transport: Transport) -> Fate:
    P_world = runtime.world_of(transport)
    halo(P_world)
    clear()
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    inject("connect")
    fate = fate_of(transport, lambda: halo(P_world))
    time.sleep(0.2)
    fate.misuses += violations()
    return fate


def test_death_before_the_first_message(mortals: Mortals) -> None:
    """The survivor is inside NCCL until the flag of an abort ends that, and is freed afterwards."""
    (fate,) = mortals.run(RANKS, connect_to_the_dead, timeout_s=LONG_S, dead=1)
    assert isinstance(fate.error, PeerFailure) and fate.error.rank == 1, fate
    assert fate.after_s < allowed_s(2.0)
    assert fate.misuses == []


def die_behind_a_full_queue(transport: Transport) -> Fate:
    """Rank 1 takes part in the first few of many operators."""
    P_world = runtime.world_of(transport)
    halo(P_world)
    clear()
    in_flight: list[InFlight] = []
    begun_s: list[float] = []

    def play() -> None:
        configure("queue_depth", 8)
        begun_s.append(time.monotonic() + 0.3)
        if transport.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(50):
            in_flight.append(started_halo(P_world))

    fate = fate_of(transport, play, begun_s=begun_s)
    let_go(in_flight)
    return fate


def test_death_while_a_stream_has_no_room(mortals: Mortals) -> None:
    """A launch holds the driver's lock until the kernel that hangs has ended."""
    (fate,) = mortals.run(RANKS, die_behind_a_full_queue, timeout_s=LONG_S, dead=1)
    assert isinstance(fate.error, PeerFailure) and fate.error.rank == 1, fate
    assert fate.after_s < allowed_s(2.0), fate
    assert fate.misuses == []


def close_before_queued_kernels(transport: Transport) -> list[str]:
    """The second operator takes its time; the third packs when the world is closed already."""
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    configure("asynchronous", 1)
    inject("stall")
    inject("delay", after=1)
    in_flight = [started_halo(P_world, factor) for factor in (1.0, 2.0, 3.0)]
    give_up(transport)
    transport.close()
    time.sleep(1.0)
    misuses = violations()
    clear()
    let_go(in_flight)
    return misuses


def test_kernels_queued_behind_an_abort_find_their_memory(mortals: Mortals) -> None:
    found = mortals.run(RANKS, close_before_queued_kernels, timeout_s=LONG_S)
    assert found == [[]] * RANKS


def split_beside_an_operator(transport: Transport) -> list[str]:
    P_world = runtime.world_of(transport)
    assert isinstance(transport, NcclTransport)
    clear()
    expected = halo(P_world)
    everyone = transport.communicator(range(transport.size))
    inject("delay")
    in_flight = started_halo(P_world)
    transport.split(everyone, [0] * transport.size, list(range(transport.size)))
    assert torch.equal(in_flight.wait(0), expected)
    return violations()


def test_split_waits_for_operators(mortals: Mortals) -> None:
    found = mortals.run(RANKS, split_beside_an_operator, timeout_s=LONG_S)
    assert found == [[]] * RANKS


def wide_halo(P_world: Partition) -> ops.HaloExchange:
    """With neighbours in all directions, whose tables do not travel with the launch."""
    P_x = P_world.create_cartesian_topology_partition([2, 2])
    return ops.HaloExchange(P_x, halo=((1, 1), (1, 1)), periodic=True)


def forget(*kept: object) -> float:
    """Let go of what is bound; how long that took."""
    begin_s = time.monotonic()
    carry._rounds.cache_clear()
    while gc.collect():
        pass
    return time.monotonic() - begin_s


def drop_while_a_kernel_hangs(transport: Transport) -> tuple[float, list[str]]:
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    before = count("allocate")
    wide_halo(P_world)(torch.ones(4, 4))
    assert count("allocate") > before, "no table is in the device's memory"
    P_world.barrier()
    inject("stall")
    in_flight = started_halo(P_world)
    forgetting_s = forget()
    give_up(transport)
    let_go([in_flight])
    return forgetting_s, violations()


def test_dropped_operators_do_not_wait_for_kernels(mortals: Mortals) -> None:
    """Their device memory goes later: Python goes on meanwhile, and learns of deaths."""
    for forgetting_s, misuses in mortals.run(GRID, drop_while_a_kernel_hangs, timeout_s=LONG_S):
        assert forgetting_s < allowed_s(1.0)
        assert misuses == []


def replay_what_was_dropped(transport: Transport) -> list[str]:
    P_world = runtime.world_of(transport)
    clear()
    x = torch.arange(16.0).reshape(4, 4) + 100 * transport.rank
    expected = wide_halo(P_world)(x)
    with Graph() as graph:
        y = wide_halo(P_world)(x)
    forget()
    wide_halo(P_world)(x)
    y.fill_(-1.0)
    graph.launch()
    misuses = violations()
    assert misuses or torch.equal(y, expected)
    clear()
    graph.destroy()
    return misuses


def test_tables_live_as_long_as_graphs(mortals: Mortals) -> None:
    found = mortals.run(GRID, replay_what_was_dropped, timeout_s=LONG_S)
    assert found == [[]] * GRID
