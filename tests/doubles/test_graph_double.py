"""Captures and graphs of the double of CUDA's driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_int, c_uint64, c_void_p

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import device, finish, is_complete, make
from tests.doubles.nccl import clear, nccl, violations
from tests.doubles.ranks import Rank, check, join, make_id, run_all

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

UNSUPPORTED = 900
UNJOINED = 904
ISOLATION = 905
CAPTURED_EVENT = 907


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


def begin(stream: int | None) -> int:
    number = nccl().gpudist_double_begin_capture(stream)
    assert number > 0
    return number


def end(number: int) -> int:
    return nccl().gpudist_double_end_capture(number)


def launch(number: int, stream: int | None) -> None:
    check(nccl().gpudist_double_launch_graph(number, stream))
    finish(stream)


def put_copy(to: np.ndarray, given: np.ndarray, stream: int | None) -> None:
    check(device().copy(to.ctypes.data, given.ctypes.data, given.nbytes, stream))


@pytest.mark.parametrize("is_null", [False, True])
def test_works_are_done_at_each_launch(is_null: bool) -> None:
    """Each launch reads the current values at the captured addresses."""
    stream = None if is_null else make("stream")
    x, y, rank = np.arange(4.0), np.zeros(4), join(make_id(), 1, 0)
    z, total = np.ones(4, np.float32), np.zeros(4, np.float32)
    rank.stream = stream
    number = begin(stream)
    put_copy(y, x, stream)
    check(rank.all_reduce(z, total))
    check(end(number))
    assert not y.any() and not total.any()
    for _ in range(2):
        x += 1
        z += 1
        launch(number, stream)
        assert (y == x).all() and (total == z).all()
    check(nccl().gpudist_double_destroy_graph(number))
    assert nccl().gpudist_double_launch_graph(number, stream) == 400
    check(rank.destroy())


def test_stream_that_joins_a_capture() -> None:
    first, second, event = make("stream"), make("stream"), make("event")
    x, y, z = np.arange(4.0), np.zeros(4), np.zeros(4)
    number = begin(first)
    put_copy(y, x, first)
    check(device().record_event(event, first))
    check(device().wait_event(second, event))
    put_copy(z, y, second)
    id_ = c_uint64()
    check(device().capture_id(second, id_))
    assert id_.value == number
    check(device().record_event(event, second))
    check(device().wait_event(first, event))
    check(end(number))
    check(device().capture_id(second, id_))
    assert id_.value == 0
    assert not z.any()
    launch(number, first)
    assert (z == x).all()


def test_stream_that_does_not_come_back() -> None:
    first, second, event = make("stream"), make("stream"), make("event")
    x, y = np.arange(4.0), np.zeros(4)
    number = begin(first)
    check(device().record_event(event, first))
    check(device().wait_event(second, event))
    put_copy(y, x, second)
    assert end(number) == UNJOINED


def test_events_inside_and_outside() -> None:
    stream, inside, outside = make("stream"), make("event"), make("event")
    check(device().record_event(outside, stream))
    finish(stream)
    number = begin(stream)
    assert device().wait_event(stream, outside) == ISOLATION
    check(device().record_event(inside, stream))
    mode = c_int(2)
    check(device().exchange_capture_mode(mode))
    assert is_complete(outside)
    assert device().query_event(inside, ctypes.c_bool()) == CAPTURED_EVENT
    check(device().exchange_capture_mode(mode))
    check(end(number))
    assert device().wait_event(None, inside) == CAPTURED_EVENT
    check(device().record_event(inside, stream))
    finish(stream)
    assert is_complete(inside)


def test_what_threads_may_call() -> None:
    """During a capture, threads in the default mode may not allocate or query."""
    stream, event, id_ = make("stream"), make("event"), c_uint64(1)

    def body() -> int:
        check(device().capture_id(stream, id_))
        assert id_.value == 0
        number = begin(stream)
        check(device().capture_id(stream, id_))
        assert id_.value == number
        check(device().capture_id(None, id_))
        assert id_.value == 0
        assert device().allocate(ctypes.byref(c_void_p()), 8) == UNSUPPORTED
        assert device().query_event(event, ctypes.c_bool()) == UNSUPPORTED
        mode = c_int(2)
        check(device().exchange_capture_mode(mode))
        assert (mode.value, is_complete(event)) == (0, True)
        check(device().exchange_capture_mode(mode))
        assert (mode.value, device().query_event(event, ctypes.c_bool())) == (2, UNSUPPORTED)
        return number

    (number,) = run_all([body])
    check(end(number))
    check(device().release(make("allocate", 8)))


def test_memory_that_is_freed_before_a_launch() -> None:
    stream, y = make("stream"), np.zeros(8)
    memory = make("allocate", 64)
    number = begin(stream)
    check(device().copy(y.ctypes.data, memory, 64, stream))
    check(end(number))
    launch(number, stream)
    check(device().release(memory))
    check(nccl().gpudist_double_launch_graph(number, stream))
    while not violations():
        pass
    assert violations() == ["illegal address: a copy touches memory that release has ended"]


def test_collective_that_runs_after_its_communicator() -> None:
    """Launch a graph after the last communicator it uses has been destroyed."""
    rank, x = join(make_id(), 1, 0), np.ones(4, np.float32)
    number = begin(None)
    check(Rank(rank.comm, 0, 1, None).all_reduce(x, x))
    check(end(number))
    check(nccl().gpudist_double_launch_graph(number, None))
    check(nccl().gpudist_double_destroy_graph(number))
    check(rank.destroy())
    assert violations() == []


def test_order_of_works_without_an_event_between_them() -> None:
    """A graph may run works of two streams in any order that keeps each stream's own."""
    first, second, event = make("stream"), make("stream"), make("event")
    total, ones, twos = np.zeros(1), np.ones(1), np.full(1, 2.0)
    seen = np.zeros(1)
    number = begin(first)
    check(device().record_event(event, first))
    check(device().wait_event(second, event))
    put_copy(total, ones, first)
    put_copy(total, twos, second)
    put_copy(seen, total, second)
    check(device().record_event(event, second))
    check(device().wait_event(first, event))
    check(end(number))
    found = set()
    for _ in range(60):
        launch(number, first)
        found.add((total[0], seen[0]))
    assert found == {(2.0, 2.0), (1.0, 2.0), (1.0, 1.0)}
