"""Ends of communicators of the NCCL double: aborts, and graphs and threads that still use them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import finish, make
from tests.doubles.nccl import (
    clear,
    inject,
    nccl,
    violations,
)
from tests.doubles.ranks import Group, Rank, check, join, last_error, make_id, run_in_threads

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

INVALID_USAGE = 5
REMOTE_ERROR = 6
A_WHILE_S = 0.05
SOON_S = 10.0


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


class Call:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        self.result = call()

    def is_over(self, within_s: float = A_WHILE_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


def pair() -> Rank:
    """Return one of two ranks; the other does nothing."""
    return run_in_threads(2, lambda rank: rank)[0]


def memory() -> np.ndarray:
    return np.full(4, 7.0, np.float32)


def abort_in_group(rank: Rank) -> int | None:
    with Group() as group:
        check(rank.abort())
    return group.result


def split(rank: Rank) -> str:
    with pytest.raises(RuntimeError) as caught:
        rank.split(0, 0)
    return str(caught.value)


def connect(rank: Rank) -> int:
    inject("connect")
    return rank.send(memory(), 1)


@pytest.mark.parametrize("inside", [split, connect])
def test_abort_while_a_thread_is_inside(inside: Callable[[Rank], Any]) -> None:
    """The abort is refused: it would free memory that the thread uses."""
    rank = pair()
    call = Call(lambda: inside(rank))
    assert not call.is_over()
    assert rank.abort() == INVALID_USAGE
    assert "another thread is in a call" in violations()[-1]
    assert not call.is_over()
    with Group():
        check(rank.abort())
        assert call.is_over(SOON_S)


@pytest.mark.parametrize("inside", [split, connect])
def test_abort_in_a_group_ends_the_wait_of_a_thread_inside(inside: Callable[[Rank], Any]) -> None:
    """The end of the group frees the memory; the thread has to leave before."""
    rank = pair()
    call = Call(lambda: inside(rank))
    assert not call.is_over()
    with Group() as group:
        check(rank.abort())
        assert call.is_over(SOON_S)
        assert rank.send(memory(), 1) == INVALID_USAGE
        assert "is being aborted" in last_error()
    assert group.result == INVALID_USAGE  # that of the call which failed
    assert violations() == []
    assert rank.abort() == INVALID_USAGE
    assert "has ended already" in violations()[-1]


def test_group_that_ends_before_the_thread_inside_has_left() -> None:
    rank = pair()
    call = Call(lambda: connect(rank))
    assert not call.is_over()
    assert abort_in_group(rank) == INVALID_USAGE
    assert "while another thread is in a call" in violations()[-1]
    assert call.is_over(SOON_S)
    assert call.result == REMOTE_ERROR


@pytest.mark.parametrize("is_grouped", [False, True])
def test_abort_while_finalize_is_inside(is_grouped: bool) -> None:
    """It is refused in a group too: finalize would go on with freed memory."""
    (rank, peer), x = run_in_threads(2, lambda rank: rank), memory()
    rank.stream, peer.stream = make("stream"), make("stream")
    check(rank.recv(x, 1))
    call = Call(rank.finalize)
    assert not call.is_over()
    if is_grouped:
        with Group():
            assert rank.abort() == INVALID_USAGE
    else:
        assert rank.abort() == INVALID_USAGE
    assert "another thread is in its finalize" in violations()[-1]
    assert not call.is_over()
    check(peer.send(memory(), 0))
    assert call.is_over(SOON_S)


def captured(rank: Rank, x: np.ndarray) -> int:
    """Return the number of a graph with an operation of the rank."""
    rank.stream = make("stream")
    number = nccl().gpudist_double_begin_capture(rank.stream)
    check(rank.all_reduce(x, x))
    check(nccl().gpudist_double_end_capture(number))
    return number


@pytest.mark.parametrize("end", [Rank.finalize, Rank.destroy, Rank.abort, abort_in_group])
def test_ends_wait_for_graphs(end: Callable[[Rank], Any]) -> None:
    rank, x = join(make_id(), 1, 0), memory()
    number = captured(rank, x)
    call = Call(lambda: end(rank))
    assert not call.is_over()
    check(nccl().gpudist_double_destroy_graph(number))
    assert call.is_over(SOON_S)
    assert call.result == 0
    assert violations() == []


def test_flag_of_an_abort_does_not_wait_for_graphs() -> None:
    """A replay on its way ends at once, and nothing is freed under it."""
    rank, x = pair(), memory()
    number = captured(rank, x)
    check(nccl().gpudist_double_launch_graph(number, rank.stream))
    time.sleep(A_WHILE_S)
    call = Call(lambda: abort_in_group(rank))
    assert rank.stream is not None
    finish(rank.stream)
    assert not call.is_over()
    check(nccl().gpudist_double_launch_graph(number, rank.stream))
    finish(rank.stream)
    check(nccl().gpudist_double_destroy_graph(number))
    assert call.is_over(SOON_S)
    assert violations() == []
