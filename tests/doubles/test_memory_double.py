"""Memory of the double of CUDA's driver after its end, and streams without room."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from ctypes import c_void_p

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
)  # fmt: skip
from tests.doubles.nccl import clear, configure, contexts, forget_contexts, hang, nccl, violations
from tests.doubles.ranks import check, run_all

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

ILLEGAL_ADDRESS = 700
A_WHILE_S = 0.05


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


def of_nccl(nbytes: int) -> int:
    memory = c_void_p()
    check(nccl().ncclMemAlloc(ctypes.byref(memory), nbytes))
    assert memory.value is not None
    return memory.value


def in_background(call) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_nccls_memory_ends_at_once() -> None:
    """A stream that reaches freed memory later does not touch it, and breaks the device."""
    stream, x = make("stream"), np.ones(8)
    memory = of_nccl(64)
    hang(stream)
    check(device().copy(memory, x.ctypes.data, 64, stream))
    check(nccl().ncclMemFree(memory))
    assert violations() == []
    nccl().gpudist_double_clear()
    while not violations():
        time.sleep(1e-3)
    assert violations() == ["illegal address: a copy touches memory that ncclMemFree has ended"]
    assert device().record_event(make_event_of_before(), stream) == ILLEGAL_ADDRESS
    assert device().error_string(ILLEGAL_ADDRESS) == b"an illegal memory access was encountered"


EVENTS: list[int] = []


def make_event_of_before() -> int:
    """A broken device creates no events."""
    assert device().create_event(ctypes.byref(c_void_p())) == ILLEGAL_ADDRESS
    return EVENTS[0]


@pytest.fixture(autouse=True)
def event() -> None:
    EVENTS[:] = [make("event")]


def test_release_waits_for_kernels_however_long() -> None:
    stream, memory = make("stream"), make("allocate", 64)
    hang(stream)
    thread = in_background(lambda: device().release(memory))
    thread.join(A_WHILE_S)
    assert thread.is_alive()
    clear()
    thread.join(10)
    assert not thread.is_alive()
    assert violations() == []


def test_an_address_is_never_given_twice() -> None:
    seen = set()
    for _ in range(20):
        memory = make("allocate", 4096)
        check(device().release(memory))
        assert memory not in seen
        seen.add(memory)


def test_stream_without_room_blocks_every_call() -> None:
    configure("queue_depth", 3)
    stream, other, event = make("stream"), make("stream"), make("event")
    hang(stream)
    time.sleep(A_WHILE_S)  # it is no longer in the queue
    for _ in range(3):
        check(device().record_event(event, stream))
    full = in_background(lambda: device().record_event(event, stream))
    full.join(A_WHILE_S)
    assert full.is_alive()
    calls = [
        in_background(lambda: is_complete(event)),
        in_background(lambda: device().record_event(event, other)),
        in_background(lambda: make("allocate", 8)),
    ]
    for call in calls:
        call.join(A_WHILE_S)
        assert call.is_alive()
    clear()
    for call in (full, *calls):
        call.join(10)
        assert not call.is_alive()
    finish(stream)


def test_contexts() -> None:
    """A thread has no context until it chooses one; only NCCL's and torch's calls make one."""
    configure("devices", 3)
    forget_contexts()

    def choose() -> None:
        assert current_context() is None
        check(set_device(2))
        check(device().record_event(EVENTS[0], None))
        assert current_context() is not None

    def forget_to_choose() -> None:
        assert table().record_event(EVENTS[0], None) == 201
        assert table().exchange_capture_mode(ctypes.c_int(2)) == 0

    run_all([choose])
    assert contexts() == {2: "context_of"}
    run_all([forget_to_choose])
    assert contexts() == {2: "context_of"}
    assert violations() == ["record_event: this thread has no context"]


def test_null_stream_with_a_thread() -> None:
    """Work on the null stream runs later while it has a thread; without it, after that work."""
    configure("asynchronous", 1)
    x, y, z = np.arange(8.0), np.zeros(8), np.zeros(8)
    nccl().gpudist_double_hang(None)
    check(device().copy(y.ctypes.data, x.ctypes.data, x.nbytes, None))
    assert not is_complete(recorded(None))
    assert not y.any()
    clear()
    check(device().copy(z.ctypes.data, y.ctypes.data, y.nbytes, None))
    assert (z == x).all()


def recorded(stream: int | None) -> int:
    check(device().record_event(EVENTS[0], stream))
    return EVENTS[0]
