"""Operators beside the current stream, and in captured ones, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import time

import pytest
import torch

from gpudist.errors import CollectiveTimeout, PeerFailure, TransportError
from gpudist.exchange import InFlight, start
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.graphs import Graph
from tests.doubles.nccl import clear, inject, violations
from tests.transport.nccl_actions import (
    all_sum_reduce,
    block_of,
    broadcast,
    halo,
    halo_of,
)
from tests.transport.worlds import results

RANKS = 3
DELAY_S = 0.3
REPLAYS = 40


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    results("nccl", RANKS, Transport.check, timeout_s=60.0)


def started_halo(P_world: Partition, factor: float = 1.0) -> InFlight:
    """Start a halo exchange of a temporary input, whose memory would be reused next."""
    x = block_of(P_world) * factor
    return start([halo_of(P_world).movement(x)], [x])


def overlap(transport: Transport) -> list[str]:
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world)
    if transport.rank == 1:
        inject("delay")
    begin_s = time.monotonic()
    first, second = started_halo(P_world), started_halo(P_world, -2.0)
    starting_s = time.monotonic() - begin_s
    taken = [torch.full((4, 6), float("nan")) for _ in range(50)]
    # On the current stream, which is the third.
    blocking = halo(P_world)
    blocking_s = time.monotonic() - begin_s
    # Others may begin when a part of the delay is over.
    assert transport.rank != 1 or starting_s < DELAY_S <= blocking_s
    assert torch.equal(blocking, expected)
    assert torch.equal(second.wait(0), -2.0 * expected)
    assert torch.equal(first.wait(0), expected)
    assert len(taken) == 50
    return violations()


def test_started_operators_overlap_and_keep_their_order() -> None:
    assert results("nccl", RANKS, overlap) == [[]] * RANKS


def fail_between(transport: Transport, aborts: bool) -> tuple[BaseException | None, bool]:
    """Return the error of wait(), and whether the output became NaN."""
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    all_sum_reduce(P_world)
    if transport.rank == 1:
        inject("stall")
    first = started_halo(P_world)
    if transport.rank == 1 and aborts:
        transport.abort(Failure("PeerFailure", 1, "rank 1 gives up"))
    error = None
    try:
        first.wait(0)
    except (CollectiveTimeout, PeerFailure) as raised:
        error = raised.with_traceback(None)
    clear()
    output = first.outputs[0]
    assert output is not None
    return error, bool(output.isnan().all())


@pytest.mark.parametrize(("aborts", "kind"), [(True, PeerFailure), (False, CollectiveTimeout)])
def test_failure_between_start_and_wait(aborts: bool, kind: type[BaseException]) -> None:
    for error, is_poisoned in results("nccl", RANKS, fail_between, aborts, timeout_s=1.0):
        assert isinstance(error, kind), error
        assert is_poisoned


def never_wait(transport: Transport) -> str:
    """The world ends, and the operator that nobody waits for uses no memory any more."""
    P_world = runtime.world_of(transport)
    clear()
    if transport.rank == 1:
        inject("delay")
    in_flight = started_halo(P_world)
    outputs = in_flight.outputs[0]
    assert outputs is not None
    del in_flight
    before = outputs.clone()
    time.sleep(2 * DELAY_S)
    assert torch.equal(before.nan_to_num(-1.0), outputs.nan_to_num(-1.0))
    with pytest.raises(TransportError) as caught:
        halo(P_world)
    return str(caught.value)


def test_an_operator_that_nobody_waits_for_ends_the_world() -> None:
    for text in results("nccl", RANKS, never_wait):
        assert "started 'halo_exchange" in text and "did not wait for it" in text


def in_capture(transport: Transport) -> list[str]:
    """Capture bound operators; graphs and eager operators share their staging memory."""
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world), broadcast(P_world), all_sum_reduce(P_world)
    small = transport.staging_bytes
    for _ in range(2):
        with Graph() as graph:
            found = halo(P_world), broadcast(P_world), all_sum_reduce(P_world)
        for y in found:
            y.fill_(-1.0)
        graph.launch()
        assert all(map(torch.equal, found, expected))
        graph.destroy()
        assert torch.equal(halo(P_world), expected[0])
        assert transport.staging_bytes == small
    return violations()


def test_bound_operators_can_be_captured() -> None:
    assert results("nccl", RANKS, in_capture) == [[]] * RANKS


def outgrown(transport: Transport) -> list[str]:
    """Memory of a graph stays where it is when a later operator needs more."""
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world)
    with Graph() as graph:
        y = halo(P_world)
    small = transport.staging_bytes
    large = torch.ones(100_000, 6)
    for _ in range(2):
        assert bool((halo_of(P_world, rows=100_000)(large) == 1.0).all())
        y.fill_(-1.0)
        graph.launch()
        assert torch.equal(y, expected)
    assert transport.staging_bytes >= small + (1 << 20)
    graph.destroy()
    return violations()


def test_memory_of_a_graph_is_kept_when_staging_grows() -> None:
    assert results("nccl", RANKS, outgrown) == [[]] * RANKS


def unbound_in_capture(transport: Transport) -> tuple[str, list[str]]:
    P_world = runtime.world_of(transport)
    clear()
    all_sum_reduce(P_world)
    with Graph() as graph, pytest.raises(TransportError) as caught:
        halo(P_world)
    graph.destroy()
    return str(caught.value), violations()


def test_operators_are_bound_before_they_are_captured() -> None:
    for text, misuses in results("nccl", RANKS, unbound_in_capture):
        assert "'halo_exchange on [1, 3]" in text
        assert "call it once before the capture" in text
        assert misuses == []


def watched_in_capture(transport: Transport) -> list[str]:
    """Threads that look after other operations disturb no capture."""
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world)
    inject("delay")
    in_flight = started_halo(P_world)
    with Graph() as graph:
        time.sleep(DELAY_S / 2)
    graph.destroy()
    assert torch.equal(in_flight.wait(0), expected)
    return violations()


def test_the_watchdog_disturbs_no_capture() -> None:
    assert results("nccl", RANKS, watched_in_capture) == [[]] * RANKS


def beside_in_capture(transport: Transport) -> list[str]:
    """A graph moves the same cells in any order that its events allow."""
    P_world = runtime.world_of(transport)
    clear()
    first, second = (block_of(P_world) * factor for factor in (1.0, -2.0))
    movement = halo_of(P_world).movement(first)
    expected = halo(P_world)
    with Graph() as graph:
        in_flight = start([movement], [first])
        y = halo_of(P_world)(second)
        x = in_flight.wait(0)
    for _ in range(REPLAYS):
        x.fill_(-1.0)
        y.fill_(-1.0)
        graph.launch()
        assert torch.equal(x, expected) and torch.equal(y, -2.0 * expected)
    graph.destroy()
    return violations()


def test_operators_of_a_graph_keep_their_order_on_any_streams() -> None:
    assert results("nccl", RANKS, beside_in_capture) == [[]] * RANKS
