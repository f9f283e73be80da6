"""An operation that goes wrong on one rank ends all of them in time, over the doubles of NCCL."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest
import torch

from gpudist.errors import CollectiveTimeout, PeerFailure, TransportError
from gpudist.transport.base import Signature, Transport
from gpudist.transport.failure.channel import Failure
from gpudist.world import runtime
from tests.doubles.nccl import clear, inject, violations
from tests.transport.nccl_actions import (
    ACTIONS,
    Fate,
    all_sum_reduce,
    check_all_failed,
    halo,
    with_fault,
)
from tests.transport.worlds import results

RANKS = 3
DEADLINE_S = 1.0
# Nothing but a stall waits for the deadline.
LONG_S = 20.0
# The ranks take turns, so that each of them is the one where it happens.
TURNS = [(name, number % RANKS) for number, name in enumerate(ACTIONS)]


def fates(name: str, what: str, rank: int, after: int, is_bound: bool = True) -> list[Fate]:
    ranks = RANKS + 1 if name == "triples" else RANKS
    timeout_s = DEADLINE_S if what.startswith("stall") else LONG_S
    return results(
        "nccl", ranks, with_fault, name, what, rank, after, is_bound, timeout_s=timeout_s
    )


@pytest.fixture(scope="module", autouse=True)
def started() -> None:
    """The processes, whose imports take longer than the deadline."""
    results("nccl", RANKS + 1, play_all, timeout_s=60.0)


def play_all(transport: Transport) -> None:
    P_world = runtime.world_of(transport)
    for action in ACTIONS.values():
        action(P_world)


@pytest.mark.parametrize(
    ("name", "rank", "is_bound"),
    [(*turn, True) for turn in TURNS]
    + [("halo", 0, False), ("broadcast", 1, False), ("overlapped", 2, False)],
)
def test_stall(name: str, rank: int, is_bound: bool) -> None:
    texts = check_all_failed(fates(name, "stall", rank, 1, is_bound), DEADLINE_S, CollectiveTimeout)
    assert len(set(texts)) == 1
    assert f"was not complete after {DEADLINE_S:g} s" in texts[0]
    assert all(f"rank {r}: #" in texts[0] for r in range(RANKS)), texts[0]


@pytest.mark.parametrize(("name", "rank", "after"), [(*turn, 3 * turn[1]) for turn in TURNS])
def test_async_error(name: str, rank: int, after: int) -> None:
    ended = fates(name, "async_error", rank, after)
    texts = check_all_failed(ended, DEADLINE_S, TransportError)
    assert all("there was a network error (injected)" in text for text in texts), texts


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "rank"), TURNS)
@pytest.mark.parametrize(("after", "is_bound"), [(0, True), (2, True), (1, False), (7, False)])
def test_call_error(name: str, rank: int, after: int, is_bound: bool) -> None:
    ended = fates(name, "call_error", rank, after, is_bound)
    if any(fate.error for fate in ended):
        texts = check_all_failed(ended, DEADLINE_S, TransportError)
        assert all("injected failure" in text for text in texts), texts
    else:  # it was in the registration of memory, which is not needed
        assert not is_bound


@pytest.mark.parametrize("name", ACTIONS)
def test_delay(name: str) -> None:
    """A delay causes no failure, and the numbers are right."""
    for rank, fate in enumerate(fates(name, "delay", 1, 2)):
        assert fate.error is None and fate.misuses == [], f"rank {rank}: {fate}"


@pytest.mark.parametrize(("rank", "members"), [(0, "[0, 1, 2]"), (3, "[1, 2, 3]")])
def test_communicator_that_is_never_made(rank: int, members: str) -> None:
    """All ranks that make the communicator notice.

    The fourth may be the first to raise, and names what it waits for: its partners, whose last
    operations are in the message too.
    """
    ended = fates("triples", "stall_init", rank, 0, is_bound=False)
    texts = check_all_failed(ended, DEADLINE_S, CollectiveTimeout)
    assert f"making the communicator of ranks {members}" in texts[0]
    assert len(set(texts)) == 1


DEVICE_CALLS = [
    "launch_combine", "record_event", "wait_event", "copy", "query_event", "create_event",
    "allocate", "allocate_pinned", "create_stream", "set_context", "capture_id",
]  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", DEVICE_CALLS)
@pytest.mark.parametrize(("name", "after"), [("halo", 0), ("overlapped", 3)])
def test_device_call(call: str, name: str, after: int) -> None:
    """All ranks fail, or the call was not needed and none does."""
    ended = fates(name, f"device:{call}", 1, after, is_bound=after > 0)
    if call == "query_event":  # by the watchdog, perhaps when others have done everything
        ended = [fate for fate in ended if fate.error]
    if any(fate.error for fate in ended):
        check_all_failed(ended, DEADLINE_S, TransportError)
    if call in ("launch_combine", "record_event", "capture_id"):
        assert not isinstance(ended[0].error, (PeerFailure, type(None))), ended


def abort_any_time(transport: Transport, seed: int) -> list[str]:
    """A thread ends the world while this one goes on calling NCCL."""
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    failure = Failure("TransportError", transport.rank, f"rank {transport.rank} gives up")
    after_s = random.Random(seed).uniform(0.0, 0.02)
    threading.Timer(after_s, transport.abort, [failure]).start()
    with pytest.raises(TransportError, match="gives up"):
        while True:
            halo(P_world)
            all_sum_reduce(P_world)
    transport.close()
    return violations()


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_used_after_an_abort(seed: int) -> None:
    assert results("nccl", RANKS, abort_any_time, seed) == [[]] * RANKS


def hold_the_interpreter(transport: Transport) -> str:
    """Only native threads run when the deadline passes."""
    clear()
    inject("stall")
    everyone = transport.communicator(range(transport.size))
    signature = Signature('a "quoted" label \\', bytes(16))

    def hold() -> None:
        time.sleep(0.2)
        ctypes.PyDLL("").usleep(int(1e6 * (DEADLINE_S + 1.0)))

    holder = threading.Thread(target=hold)
    holder.start()
    with pytest.raises(CollectiveTimeout) as caught, transport.group(signature):
        everyone.broadcast(torch.zeros(3), 0)
    holder.join()
    clear()
    return str(caught.value)


def test_the_deadline_needs_no_interpreter() -> None:
    for text in results("nccl", RANKS, hold_the_interpreter, timeout_s=DEADLINE_S):
        assert 'a "quoted" label \\' in text
        assert "was not complete" in text
