"""Operators on streams that end, or are waited for on others, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import time

import pytest
import torch

from gpudist.errors import TransportError
from gpudist.exchange import start
from gpudist.transport.base import Transport
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from tests.doubles.device import device, finish, is_complete, make
from tests.doubles.graphs import Graph
from tests.doubles.nccl import clear, inject, violations
from tests.transport.nccl_actions import block_of, halo, halo_of
from tests.transport.worlds import collect, results

RANKS = 2


def stream_with_the_same_handle(transport: Transport) -> list[str]:
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world)
    operator, current = halo_of(P_world), [0]
    x, negative = block_of(P_world), -block_of(P_world)
    transport.stream = lambda: current[0]
    collect()  # which ask the transport for its stream
    first = make("stream")
    inject("delay")
    current[0] = first
    y = operator(x)
    assert device().destroy_stream(first) == 0
    second = current[0] = make("stream")
    assert second == first
    z = operator(negative)
    current[0] = 0
    finish(second)
    time.sleep(0.5)  # what was on the first stream has ended too
    assert torch.equal(z, -expected)
    assert torch.equal(y, expected)
    return violations()


def test_a_stream_may_have_the_handle_of_another_that_has_ended() -> None:
    """Work of the new stream follows the ended stream's, whose messages share memory."""
    assert results("nccl", RANKS, stream_with_the_same_handle) == [[]] * RANKS


def wait_on_another_stream(transport: Transport) -> list[str]:
    assert isinstance(transport, NcclTransport)
    P_world = runtime.world_of(transport)
    clear()
    expected = halo(P_world)
    first, second, event = make("stream"), make("stream"), make("event")
    x = block_of(P_world)
    inject("delay")
    transport.stream = lambda: first
    in_flight = start([halo_of(P_world).movement(x)], [x])
    transport.stream = lambda: second
    y = in_flight.wait(0)
    transport.stream = lambda: 0
    # Memory freed now may be reused by a kernel on the first stream.
    assert device().record_event(event, first) == 0
    time.sleep(0.05)
    assert not is_complete(event)
    finish(second)
    assert torch.equal(y, expected)
    finish(first)
    return violations()


def test_inputs_are_in_use_on_the_stream_of_the_start() -> None:
    assert results("nccl", RANKS, wait_on_another_stream) == [[]] * RANKS


def go_on_after_a_refusal(transport: Transport) -> list[str]:
    P_world = runtime.world_of(transport)
    clear()
    with Graph() as graph, pytest.raises(TransportError, match="call it once before the capture"):
        halo(P_world)
    graph.destroy()
    first = halo(P_world)
    with Graph() as graph:
        y = halo(P_world)
    graph.launch()
    assert torch.equal(y, first)
    graph.destroy()
    return violations()


def test_an_operator_captured_too_early_ends_no_world() -> None:
    """Every rank refuses it, before the first message."""
    assert results("nccl", RANKS, go_on_after_a_refusal) == [[]] * RANKS
