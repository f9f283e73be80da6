"""Ends of worlds with threads inside NCCL, graphs alive and kernels queued, over the doubles."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from gpudist import ops
from gpudist.errors import PeerFailure, TransportError
from gpudist.exchange import InFlight, start
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.nccl import transport as nccl_transport
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.graphs import Graph
from tests.doubles.nccl import clear, configure, count, inject, log, violations
from tests.patience import allowed_s
from tests.transport.mortals import Mortals
from tests.transport.nccl_actions import Fate, block_of, fate_of, halo, halo_of
from tests.transport.worlds import collect

RANKS = 2
GRID = 4
LONG_S = 20.0
# Time that close() waits for peers and graphs, and that a transport waits for NCCL; shorter here.
CLOSING_S = 1.0


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
    nccl_transport._CLOSING_S = CLOSING_S
    collect()
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
    nccl_transport._CLOSING_S = CLOSING_S
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
    messages = sum(line[3] in ("send", "recv") for line in log())
    configure("asynchronous", 1)
    inject("stall")
    inject("delay", after=messages)
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
    """Return a halo exchange whose tables are too large for the arguments of a launch."""
    P_x = P_world.create_cartesian_topology_partition([2, 2])
    return ops.HaloExchange(P_x, halo=((1, 1), (1, 1)), periodic=True)


def another_world(transport: Transport) -> Partition:
    """Beside the transport's, in which an operator has tables in the device's memory."""
    assert isinstance(transport, NcclTransport)
    second = runtime.connect(
        "nccl", transport.store, transport.rank, transport.size, LONG_S,
        f"{transport.prefix}/another",
    )  # fmt: skip
    before = count("allocate")
    P_second = runtime.world_of(second)
    wide_halo(P_second)(torch.ones(4, 4))
    assert count("allocate") > before, "no table is in the device's memory"
    return P_second


def drop_while_a_kernel_hangs(transport: Transport, is_closed: bool) -> tuple[float, list[str]]:
    """Operators of this world, or of another that was closed before."""
    collect()
    clear()
    P_world = runtime.world_of(transport)
    halo(P_world)
    if is_closed:
        another_world(transport).wire.close()
    else:
        wide_halo(P_world)(torch.ones(4, 4))
    P_world.barrier()
    inject("stall")
    in_flight = started_halo(P_world)
    begin_s = time.monotonic()
    collect()
    forgetting_s = time.monotonic() - begin_s
    give_up(transport)
    let_go([in_flight])
    return forgetting_s, violations()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("is_closed", [False, True], ids=["its own", "a closed world's"])
def test_dropped_operators_do_not_wait_for_kernels(mortals: Mortals, is_closed: bool) -> None:
    """Their device memory is freed later, while Python continues and detects deaths."""
    ended = mortals.run(GRID, drop_while_a_kernel_hangs, is_closed, timeout_s=LONG_S)
    for forgetting_s, misuses in ended:
        assert forgetting_s < allowed_s(1.0)
        assert misuses == []


def drop_in_a_capture(transport: Transport, closes: bool) -> list[str]:
    """Python frees a world whenever it likes."""
    collect()
    clear()
    P_world = runtime.world_of(transport)
    halo(P_world)
    P_second = another_world(transport)
    if closes:
        P_second.wire.close()
    with Graph() as graph:
        halo(P_world)
        del P_second
        collect()
    graph.launch()
    graph.destroy()
    return violations()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("closes", [True, False])
def test_world_that_is_dropped_in_a_capture(mortals: Mortals, closes: bool) -> None:
    """A call that a capture forbids would end it."""
    found = mortals.run(GRID, drop_in_a_capture, closes, timeout_s=LONG_S)
    assert found == [[]] * GRID


def read_in_a_capture(transport: Transport) -> str:
    P_world = runtime.world_of(transport)
    clear()
    P_world.allgather_data([transport.rank])
    said = ""
    with Graph() as graph:
        try:
            said = f"no error, but {P_world.allgather_data([transport.rank])}"
        except TransportError as error:
            said = str(error)
    graph.destroy()
    # A rank that leaves has nothing to gather with.
    assert isinstance(transport, NcclTransport)
    key = f"{transport.prefix}/read"
    transport.store.add(key, 1)
    while transport.store.add(key, 0) < transport.size:
        time.sleep(0.01)
    return said


def test_data_that_the_host_reads_in_a_capture(mortals: Mortals) -> None:
    """During a capture nothing is executed, so there is no data to read."""
    for text in mortals.run(RANKS, read_in_a_capture, timeout_s=LONG_S):
        assert "capture" in text, text


def replay_what_was_dropped(transport: Transport) -> list[str]:
    P_world = runtime.world_of(transport)
    collect()
    clear()
    configure("register_limit", 10**9)
    x = torch.arange(16.0).reshape(4, 4) + 100 * transport.rank
    before = count("allocate")
    operator = wide_halo(P_world)
    expected = operator(x)
    assert count("allocate") > before, "no table is in the device's memory"
    with Graph() as graph:
        y = operator(x)
    collect()
    operator(x)
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
