"""``run_distributed`` on threads and on processes: results by rank, or the root cause."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

import gpudist
from gpudist import errors
from gpudist.testing import run_distributed
from gpudist.world import runtime
from gpudist.world.partition import Partition


def identify(P_world: Partition) -> tuple[int | None, int, int]:
    return P_world.rank, P_world.size, os.getpid()


def add(P_world: Partition, number: int, *, factor: int) -> int:
    return P_world.allreduce_data([number])[0] * factor


def fail_on(P_world: Partition, rank: int) -> None:
    if P_world.rank == rank:
        raise AssertionError(f"{P_world.rank} is not 7")
    P_world.barrier()


def hang_here(P_world: Partition, duration_s: float) -> None:
    time.sleep(duration_s)


def miss_barrier(P_world: Partition) -> None:
    if P_world.rank != 1:
        P_world.barrier()


def worlds_of_init(P_world: Partition) -> list[Any]:
    """Return whether ``init()`` is this world; also inside another one, and in a new thread."""
    inner = run_distributed(lambda P: gpudist.init() is P is runtime.world(), 1)
    found: list[Any] = [gpudist.init() is P_world, *inner, gpudist.init(timeout=9.0) is P_world]

    def ask() -> None:
        try:
            found.append(gpudist.init() is P_world)
        except errors.TransportError as error:
            found.append(str(error))

    thread = threading.Thread(target=ask, name="helper")
    thread.start()
    thread.join()
    return found


def talk(P_world: Partition) -> None:
    while True:
        P_world.barrier()


def compute(P_world: Partition) -> None:
    x = torch.ones(99, 99)
    while P_world.rank == 1:
        x = torch.tanh(x @ x)


@pytest.mark.parametrize("transport", ["loopback", "host"])
def test_run_distributed_returns_by_rank(transport: Any) -> None:
    answers = run_distributed(identify, 2, transport=transport)
    assert [answer[:2] for answer in answers] == [(0, 2), (1, 2)]
    assert (answers[0][2] == os.getpid()) == (transport == "loopback")


@pytest.mark.parametrize("transport", ["loopback", "host"])
def test_run_distributed_passes_arguments(transport: Any) -> None:
    assert run_distributed(add, 3, 2, transport=transport, factor=10) == [60, 60, 60]


@pytest.mark.parametrize("transport", ["loopback", "host"])
def test_run_distributed_raises_the_root_cause(transport: Any) -> None:
    with pytest.raises(AssertionError, match="1 is not 7"):
        run_distributed(fail_on, 2, transport=transport, rank=1)


@pytest.mark.parametrize(("transport", "timeout"), [("loopback", 0.5), ("host", 2.0)])
def test_run_distributed_reports_a_hang(
    transport: Any, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpudist.testing.GRACE_S", 0.5)
    with pytest.raises(errors.CollectiveTimeout, match="in hang_here"):
        run_distributed(hang_here, 2, 6 * timeout, transport=transport, timeout=timeout)


@pytest.mark.parametrize("transport", ["loopback", "host"])
def test_init_returns_the_world_of_the_rank(transport: Any) -> None:
    for *in_rank, in_thread in run_distributed(worlds_of_init, 2, transport=transport):
        assert in_rank == [True] * 3
        refusal = "gpudist.init: thread 'helper' is not a rank of the run_distributed that runs"
        assert in_thread is True if transport == "host" else in_thread.startswith(refusal)
    assert not runtime._runtime.worlds


@pytest.mark.parametrize("body", [talk, compute])
def test_threads_that_outlive_their_time_are_ended(
    body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpudist.testing.GRACE_S", 0.2)
    with pytest.raises(
        errors.CollectiveTimeout, match=r"2 loopback ranks had not ended after 0.3 s"
    ):
        run_distributed(body, 2, timeout=0.1)
    deadline_s = time.monotonic() + 10
    while any("loopback rank" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


STUBBORN = """
import sys, torch, gpudist.testing

def body(P_world):
    x = torch.ones(200, 200)
    while True:
        try:
            torch.tanh(x @ x)
        except BaseException:
            pass

gpudist.testing.GRACE_S = 0.1
try:
    gpudist.testing.run_distributed(body, 2, timeout=0.1)
except gpudist.errors.CollectiveTimeout:
    sys.exit(7)
"""


def test_a_thread_that_never_ends_does_not_abort_the_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", STUBBORN], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (7, "")


def test_run_distributed_names_the_transports() -> None:
    with pytest.raises(ValueError, match="use 'loopback', 'gloo' or 'host'"):
        run_distributed(identify, 2, transport="carrier pigeon")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("transport", ["loopback", "host"])
def test_run_distributed_ends_a_wait_at_its_deadline(transport: Any) -> None:
    with pytest.raises(errors.CollectiveTimeout):
        run_distributed(miss_barrier, 2, transport=transport, timeout=0.5)
