"""Aborts of the NCCL double end every wait; injected faults happen where the test asks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import device, finish, is_complete, make
from tests.doubles.nccl import clear, fail_device_call, inject, nccl, violations
from tests.doubles.ranks import (
    Group,
    Rank,
    check,
    init,
    join,
    last_error,
    make_id,
    run_in_processes,
    run_in_threads,
)
from tests.patience import allowed_s

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

ABORTED = np.frombuffer(b"\xab" * 4, np.float32)[0]
# An abort takes milliseconds; the machine may be busy with other things.
SOON_S = 10.0
A_WHILE_S = 0.05


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


def memory(count: int = 4) -> np.ndarray:
    return np.full(count, 7.0, np.float32)


def in_background(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def end_by_abort(rank: Rank, thread: threading.Thread) -> None:
    """Check that a wait lasts until the abort and ends soon after."""
    thread.join(A_WHILE_S)
    assert thread.is_alive()
    start = time.perf_counter()
    check(rank.abort())
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert time.perf_counter() - start < SOON_S


def pair() -> list[Rank]:
    """Two ranks, both of this thread."""
    return run_in_threads(2, lambda rank: rank)


WAITS: dict[str, Callable[[Rank, np.ndarray], int]] = {
    "send": lambda rank, y: rank.send(memory(), 1),
    "recv": lambda rank, y: rank.recv(y[:4], 1),
    "broadcast": lambda rank, y: rank.broadcast(memory(8), y, 1),
    "reduce": lambda rank, y: rank.reduce(memory(8), y, "sum", 0),
    "all_reduce": lambda rank, y: rank.all_reduce(memory(8), y),
    "reduce_scatter": lambda rank, y: rank.reduce_scatter(memory(16), y),
    "all_gather": lambda rank, y: rank.all_gather(memory(), y),
}


@pytest.mark.parametrize("verb", WAITS)
def test_abort_ends_a_wait_on_the_null_stream(verb: str) -> None:
    rank, _ = pair()
    y = memory(8)
    results: list[int] = []
    thread = in_background(lambda: results.append(WAITS[verb](rank, y)))
    end_by_abort(rank, thread)
    assert results == [0]
    missing = {"send": 0, "recv": 4}.get(verb, 8)
    assert (y[:missing] == ABORTED).all()
    assert (y[missing:] == 7).all()
    assert violations() == []


def test_abort_ends_waits_on_a_stream() -> None:
    """Received data stays, missing data is marked, and work enqueued later does nothing."""
    here, there = pair()
    here.stream = make("stream")
    there.stream = make("stream")
    event = make("event")
    # Streams use what Python would free: everything that is passed has a name.
    outputs = [memory(1000) for _ in range(4)]
    x, sent = memory(1000), np.arange(1000, dtype=np.float32)
    with Group():
        check(here.recv(outputs[0], 1))
        check(here.recv(outputs[1], 1))
    check(here.recv(outputs[2], 1))
    check(here.all_reduce(x, outputs[3]))
    check(device().record_event(event, here.stream))
    check(there.send(sent, 0))
    while outputs[0][-1] != 999:
        pass
    assert not is_complete(event)
    check(here.abort())
    wait_for(event)
    assert (outputs[0] == np.arange(1000)).all()
    for y in outputs[1:]:
        assert (y == ABORTED).all()
    finish(there.stream)


def wait_for(event: int) -> None:
    start = time.perf_counter()
    while not is_complete(event):
        assert time.perf_counter() - start < SOON_S


def test_abort_of_one_rank_does_not_wake_another() -> None:
    here, there, _ = run_in_threads(3, lambda rank: rank)
    first = in_background(lambda: here.all_reduce(memory(), memory()))
    second = in_background(lambda: there.all_reduce(memory(), memory()))
    end_by_abort(here, first)
    assert there.async_error() == 0
    end_by_abort(there, second)


@pytest.mark.parametrize("what", ["stall", "async_error"])
def test_operation_that_hangs(what: str) -> None:
    """Rank 1 hangs in its second operation."""
    inject(what, rank=1, after=1)

    def body(rank: Rank) -> None:
        y = memory()
        check(rank.all_reduce(memory(), y))
        assert (y == 14).all()
        thread = in_background(lambda: rank.all_reduce(memory(), y))
        thread.join(A_WHILE_S)
        hurt = rank.rank == 1 and what == "async_error"
        assert rank.async_error() == (6 if hurt else 0)
        assert ("network error" in last_error(rank)) == hurt
        end_by_abort(rank, thread)
        assert (y == ABORTED).all()

    run_in_threads(2, body)


def test_injection_follows_a_split() -> None:
    """The rank is the one in the root communicator."""
    inject("delay", rank=2)

    def body(rank: Rank) -> float:
        part = rank.split(rank.rank // 2, 0)
        assert part is not None
        start = time.perf_counter()
        check(part.all_reduce(memory(), memory()))
        return time.perf_counter() - start

    times = run_in_threads(4, body)
    assert min(times[2:]) > 0.25
    assert max(times[:2]) < allowed_s(0.25)


def test_call_that_fails() -> None:
    rank = join(make_id(), 1, 0)
    y = memory()
    inject("call_error", after=1)
    check(rank.all_reduce(memory(), y))
    assert rank.all_reduce(memory(), y) == 2
    assert "injected" in last_error()
    check(rank.all_reduce(memory(), y))
    inject("call_error", after=2)
    y[:] = 0
    with Group() as group:
        check(rank.all_reduce(memory(), y))
        assert rank.all_reduce(memory(), memory()) == 2
    assert group.result == 2
    assert (y == 0).all()
    unique_id = make_id()
    inject("call_error")
    assert init(unique_id, 1, 0)[0] == 2
    assert violations() == []


def test_initialisation_that_stalls() -> None:
    results: list[int] = []
    inject("stall_init", rank=0)
    thread = in_background(lambda: results.append(init(make_id(), 1, 0)[0]))
    thread.join(A_WHILE_S)
    assert thread.is_alive()
    check(init(make_id(), 1, 0)[0])
    clear()
    thread.join(SOON_S)
    assert results == [2]


def test_device_call_that_fails() -> None:
    fail_device_call("record_event", after=1)
    event = make("event")
    assert [device().record_event(event, None) for _ in range(3)] == [0, 999, 0]


def mappings() -> int:
    """Count the mappings of communicators in this process."""
    with open("/proc/self/maps") as maps:
        return sum("gpudist-double" in line for line in maps)


def open_files() -> int:
    """Count the open files of communicators' memory in this process."""
    folder = "/proc/self/fd"
    files = [f"{folder}/{name}" for name in os.listdir(folder)]
    return sum("gpudist-double" in os.readlink(path) for path in files if os.path.islink(path))


def survive(rank: Rank) -> tuple[list[int], bool]:
    """Rank 1 is killed in the middle of its second operation, and the others' waits end."""
    before = [mappings(), open_files()]
    inject("crash", rank=1, after=1)
    check(rank.all_reduce(memory(), memory()))
    y = np.zeros(100_000, np.float32)
    thread = in_background(lambda: rank.all_reduce(np.ones_like(y), y))
    end_by_abort(rank, thread)
    has_come = int((y == rank.size).sum())
    is_half = 0 < has_come < y.size and bool((y[has_come:] == ABORTED).all())
    return [*before, mappings(), open_files()], is_half


def test_process_that_is_killed() -> None:
    outcomes = run_in_processes(3, survive)
    assert outcomes == [([1, 0, 0, 0], True), -9, ([1, 0, 0, 0], True)]


def lose_a_sender(rank: Rank) -> bool:
    inject("crash", rank=0)
    x, y = np.ones(100_000, np.float32), np.zeros(100_000, np.float32)
    if rank.rank == 0:
        check(rank.send(x, 1))
    thread = in_background(lambda: rank.recv(y, 0))
    end_by_abort(rank, thread)
    has_come = int((y == 1).sum())
    return 0 < has_come < y.size and bool((y[has_come:] == ABORTED).all())


def test_sender_that_is_killed() -> None:
    assert run_in_processes(2, lose_a_sender) == [-9, True]


def test_everything_is_given_back() -> None:
    """All resources are released in this process, which also created the unique ids."""

    def body(rank: Rank) -> None:
        part = rank.split(0, 0)
        assert part is not None
        check(part.all_reduce(memory(), memory()))
        check(part.destroy())
        check(rank.destroy() if rank.rank else rank.abort())

    before = mappings(), open_files()
    run_in_threads(3, body)
    assert (mappings(), open_files()) == before
    assert nccl().ncclGroupEnd() == 5, "no group is left open"
