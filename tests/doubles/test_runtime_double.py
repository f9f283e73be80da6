"""The double of CUDA's driver: the null stream executes at once, a created stream in order."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from ctypes import c_int, c_void_p

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import current_context, device, is_complete, make, set_device
from tests.doubles.nccl import clear, configure, violations
from tests.doubles.ranks import Rank, check, run_all, run_in_threads

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


def blocked_stream() -> tuple[int, Rank]:
    """Return a stream that waits for the abort of a rank's operation."""
    rank = run_in_threads(2, lambda rank: rank)[0]
    rank.stream = make("stream")
    y = np.zeros(1, np.float32)
    check(rank.recv(y, 1))
    KEPT.append(y)
    assert rank.stream is not None
    return rank.stream, rank


KEPT: list[np.ndarray] = []


def test_names_and_versions() -> None:
    version = c_int()
    assert device().name == b"double"
    assert device().abi == 9
    check(device().compiler_version(version))
    assert version.value == 13000
    assert device().error_string(0) == b"no error"
    assert device().error_string(400) == b"invalid resource handle"


def test_devices_belong_to_threads() -> None:
    count = c_int()
    configure("devices", 3)
    check(device().device_count(count))
    assert count.value == 3
    check(set_device(2))
    chosen = current_context()
    assert run_all([current_context]) == [None]
    assert set_device(3) == 101
    assert current_context() == chosen
    check(set_device(0))
    assert current_context() != chosen


def test_copies_are_in_stream_order() -> None:
    stream, rank = blocked_stream()
    x, y = np.arange(5.0), np.zeros(5)
    check(device().copy(y.ctypes.data, x.ctypes.data, x.nbytes, stream))
    event = make("event")
    check(device().record_event(event, stream))
    assert not is_complete(event)
    assert (y == 0).all()
    check(rank.abort())
    check(device().wait_event(None, event))
    assert is_complete(event)
    assert (y == x).all()
    y[:] = 0
    check(device().copy(y.ctypes.data, x.ctypes.data, x.nbytes, None))
    assert (y == x).all()


def test_events_order_streams() -> None:
    first, rank = blocked_stream()
    second, event, after = make("stream"), make("event"), make("event")
    assert is_complete(event), "nothing has been recorded yet"
    check(device().record_event(event, first))
    check(device().wait_event(second, event))
    check(device().record_event(after, second))
    time.sleep(0.02)
    assert not is_complete(after)
    check(rank.abort())
    check(device().wait_event(None, after))
    assert is_complete(event)


def test_stream_that_is_destroyed_ends_its_work() -> None:
    stream, rank = blocked_stream()
    event = make("event")
    check(device().record_event(event, stream))
    check(device().destroy_stream(stream))
    assert device().record_event(event, stream) == 400
    assert not is_complete(event)
    check(rank.abort())
    check(device().wait_event(None, event))


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


def test_release_waits_for_streams() -> None:
    _, rank = blocked_stream()
    memory = make("allocate", 64)
    thread = threading.Thread(target=lambda: check(device().release(memory)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    check(rank.abort())
    thread.join(10)
    assert not thread.is_alive()


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
