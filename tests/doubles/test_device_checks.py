"""Misuses of CUDA's driver that its double refuses: of memory, handles, captures and contexts."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from ctypes import c_int, c_uint64, c_void_p

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import (
    current_context,
    device,
    finish,
    is_complete,
    make,
    set_device,
    table,
)
from tests.doubles.nccl import clear, configure, contexts, forget_contexts, hang, nccl, violations
from tests.doubles.ranks import check, run_all

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

ILLEGAL_ADDRESS = 700
UNSUPPORTED = 900
UNJOINED = 904
ISOLATION = 905
CAPTURED_EVENT = 907


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


@pytest.mark.parametrize("kind", ["allocate", "allocate_pinned"])
def test_memory(kind: str) -> None:
    release = device().release if kind == "allocate" else device().release_pinned
    other = device().release_pinned if kind == "allocate" else device().release
    memory = make(kind, 1000)
    assert memory % 256 == 0
    assert ctypes.string_at(memory, 1000) == b"\xcd" * 1000
    assert other(memory) == 1
    check(release(memory))
    assert release(memory) == 1
    assert "memory that was not allocated so" in violations()[-1]
    check(release(None))
    assert getattr(device(), kind)(ctypes.byref(c_void_p()), 2**62) == 2


def test_handles_that_are_none() -> None:
    event = make("event")
    results = [
        device().record_event(event, 77),
        device().record_event(77, None),
        device().wait_event(None, 77),
        device().copy(1, 1, 1, 77),
        device().destroy_event(77),
        device().destroy_stream(None),
    ]
    assert results == [400] * 6
    assert len(violations()) == 6
    check(device().destroy_event(event))
    assert device().destroy_event(event) == 400


def test_nccls_memory_ends_at_once() -> None:
    """A stream that reaches freed memory later does not touch it, and breaks the device."""
    stream, event, x, memory = make("stream"), make("event"), np.ones(8), c_void_p()
    check(nccl().ncclMemAlloc(ctypes.byref(memory), 64))
    hang(stream)
    check(device().copy(memory, x.ctypes.data, 64, stream))
    check(nccl().ncclMemFree(memory))
    assert violations() == []
    nccl().gpudist_double_clear()
    while not violations():
        time.sleep(1e-3)
    assert violations() == ["illegal address: a copy touches memory that ncclMemFree has ended"]
    assert device().create_event(ctypes.byref(c_void_p())) == ILLEGAL_ADDRESS
    assert device().record_event(event, stream) == ILLEGAL_ADDRESS


def test_an_address_is_never_given_twice() -> None:
    seen = set()
    for _ in range(20):
        memory = make("allocate", 4096)
        check(device().release(memory))
        assert memory not in seen
        seen.add(memory)


def test_contexts() -> None:
    """A thread has no context until it chooses one; only NCCL's and torch's calls make one."""
    event = make("event")
    configure("devices", 3)
    forget_contexts()

    def choose() -> None:
        assert current_context() is None
        check(set_device(2))
        check(device().record_event(event, None))
        assert current_context() is not None

    def forget_to_choose() -> None:
        assert table().record_event(event, None) == 201
        assert table().exchange_capture_mode(ctypes.c_int(2)) == 0

    run_all([choose])
    assert contexts() == {2: "context_of"}
    run_all([forget_to_choose])
    assert contexts() == {2: "context_of"}
    assert violations() == ["record_event: this thread has no context"]


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
