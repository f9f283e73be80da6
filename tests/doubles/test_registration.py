"""Memory that the NCCL double treats as registered, and messages between it and other memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import c_void_p

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import device, finish, make
from tests.doubles.nccl import clear, configure, nccl, violations
from tests.doubles.ranks import Rank, check, last_error, run_in_threads

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

INVALID_USAGE = 5
BYTES = 4096
KINDS = ("nccls", "devices", "torchs", "registered")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


def array(kind: str, rank: Rank) -> np.ndarray:
    """Return an array in memory of a kind; all kinds but torch's live as long as this process."""
    if kind in ("torchs", "registered"):
        x = np.zeros(BYTES // 4, np.float32)
        if kind == "registered":
            check(
                nccl().ncclCommRegister(rank.comm, x.ctypes.data, BYTES, ctypes.byref(c_void_p()))
            )
        return x
    memory = c_void_p()
    if kind == "nccls":
        check(nccl().ncclMemAlloc(ctypes.byref(memory), BYTES))
    else:
        memory = c_void_p(make("allocate", BYTES))
    assert memory.value is not None
    return np.ctypeslib.as_array((ctypes.c_float * (BYTES // 4)).from_address(memory.value))


def exchange(rank: Rank, kinds: tuple[str, str], is_captured: bool) -> int:
    """Rank 0 sends to rank 1, each in memory of its kind."""
    check(device().exchange_capture_mode(ctypes.c_int(2)))  # the other rank's is not this one's
    x = array(kinds[rank.rank], rank)
    rank.stream = make("stream") if is_captured else None
    number = nccl().gpudist_double_begin_capture(rank.stream) if is_captured else 0
    result = rank.recv(x, 0) if rank.rank else rank.send(x, 1)
    if is_captured:
        check(result)
        check(nccl().gpudist_double_end_capture(number))
        check(nccl().gpudist_double_launch_graph(number, rank.stream))
        finish(rank.stream)
        check(nccl().gpudist_double_destroy_graph(number))
        result = rank.async_error()
    return result


def outcome(kinds: tuple[str, str], is_captured: bool) -> list[int]:
    return run_in_threads(2, lambda rank: exchange(rank, kinds, is_captured))


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_who_is_registered(first: str, second: str) -> None:
    is_registered = [kind == "registered" for kind in (first, second)]
    found = outcome((first, second), False)
    assert (max(found) == INVALID_USAGE) == (is_registered[0] != is_registered[1])
    clear()
    is_registered = [kind in ("registered", "nccls") for kind in (first, second)]
    found = outcome((first, second), True)
    assert (max(found) == INVALID_USAGE) == (is_registered[0] != is_registered[1])


def test_text_names_both_sides() -> None:
    assert max(outcome(("nccls", "torchs"), True)) == INVALID_USAGE
    words = "rank 0 sends 4096 bytes from registered memory, which are to arrive in other memory"
    assert words in last_error()
    assert any(words in text for text in violations())


def test_expandable_segments_of_torch() -> None:
    configure("expandable_segments", 1)
    assert outcome(("nccls", "torchs"), True) == [0, 0]
    assert max(outcome(("devices", "torchs"), True)) == INVALID_USAGE
    assert outcome(("devices", "torchs"), False) == [0, 0]


@pytest.mark.parametrize(
    ("variable", "kinds", "is_captured"),
    [
        ("NCCL_LOCAL_REGISTER", ("registered", "torchs"), False),
        ("NCCL_GRAPH_REGISTER", ("nccls", "torchs"), True),
    ],
)
def test_switched_off(
    monkeypatch: pytest.MonkeyPatch, variable: str, kinds: tuple[str, str], is_captured: bool
) -> None:
    monkeypatch.setenv(variable, "0")
    assert outcome(kinds, is_captured) == [0, 0]
    monkeypatch.setenv(variable, "1")
    assert max(outcome(kinds, is_captured)) == INVALID_USAGE


def test_small_messages_are_copied() -> None:
    configure("register_limit", BYTES + 1)
    assert outcome(("registered", "torchs"), False) == [0, 0]
    configure("register_limit", BYTES)
    assert max(outcome(("registered", "torchs"), False)) == INVALID_USAGE


@pytest.mark.parametrize("mixed", [False, True])
def test_collectives(mixed: bool) -> None:
    """All ranks use registered memory, or none does."""

    def body(rank: Rank) -> int:
        x = array("torchs" if mixed and rank.rank else "registered", rank)
        return rank.all_reduce(x, x)

    assert run_in_threads(2, body) == ([INVALID_USAGE] * 2 if mixed else [0, 0])
    assert any("in registered memory" in text for text in violations()) == mixed


def test_what_is_deregistered_is_no_longer() -> None:
    def body(rank: Rank) -> int:
        x, handle = array("torchs", rank), c_void_p()
        if rank.rank == 0:
            check(nccl().ncclCommRegister(rank.comm, x.ctypes.data, BYTES, ctypes.byref(handle)))
            check(nccl().ncclCommDeregister(rank.comm, handle))
        return rank.recv(x, 0) if rank.rank else rank.send(x, 1)

    assert run_in_threads(2, body) == [0, 0]
