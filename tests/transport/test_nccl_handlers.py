"""Handlers of signals while the NCCL transport waits for other ranks, over the doubles."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import torch

from gpudist.errors import GpudistError
from gpudist.exchange import InFlight, start
from gpudist.transport.base import Signature, Transport
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.device import finish
from tests.doubles.nccl import clear, configure, violations
from tests.transport.nccl_actions import block_of, halo, halo_of
from tests.transport.worlds import outcomes, results

RANKS = 2
EARLY_S, LATE_S = 0.2, 0.6
TIMEOUT_S = 4.0
Handler = Callable[[Partition, list[InFlight]], object]


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    results("nccl", RANKS, Transport.check, timeout_s=60.0)


def drop(P_world: Partition, held: list[InFlight]) -> None:
    """Drop a started operator, as a collection of garbage may do at any time."""
    held.clear()


def wait(P_world: Partition, held: list[InFlight]) -> None:
    """Wait for a started operator, and for the device."""
    held.pop().wait(0)
    P_world.wire.wait()


def move(P_world: Partition, held: list[InFlight]) -> None:
    halo(P_world)


def close(P_world: Partition, held: list[InFlight]) -> None:
    wait(P_world, held)
    P_world.wire.close()


def compare(P_world: Partition) -> None:
    """Call NCCL as nobody has before, so that the ranks first compare their calls."""
    x = torch.ones(3)
    configure("asynchronous", 1)
    try:
        with P_world.wire.group(Signature("a sum", bytes(16))):
            P_world.wire.communicator(range(RANKS)).all_reduce(x, x)
    finally:
        finish(None)
        configure("asynchronous", 0)


def interrupted(transport: Transport, handler: Handler) -> tuple[str, list[str]]:
    """Return the error of a comparison whose wait for rank 1 a signal interrupts."""
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    x = block_of(P_world)
    held = [start([halo_of(P_world).movement(x)], [x])]
    error = ""
    former = signal.signal(signal.SIGALRM, lambda *_: handler(P_world, held))
    try:
        if transport.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, EARLY_S)
        else:
            time.sleep(LATE_S)
        compare(P_world)
    except GpudistError as raised:
        error = str(raised)
    finally:
        signal.signal(signal.SIGALRM, former)
    while held and not error:
        held.pop().wait(0)
    held.clear()
    return error, violations()


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (drop, "and did not wait for it"),
        (wait, ""),
        (move, "inside another operation of this world"),
        (close, "was closed"),
    ],
    ids=["drop", "wait", "move", "close"],
)
def test_a_handler_inside_a_wait_blocks_nothing(handler: Handler, expected: str) -> None:
    first, _ = outcomes("nccl", RANKS, interrupted, handler, timeout_s=TIMEOUT_S)
    assert first.answered and first.error is None
    error, misuses = first.value
    assert expected in error and bool(error) == bool(expected)
    assert misuses == []
