"""Every misuse of NCCL that its double refuses, with NCCL's result and a message that names it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import c_void_p
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import device, is_complete, make
from tests.doubles.nccl import clear, log, make_config, nccl, violations
from tests.doubles.ranks import (
    Group,
    Rank,
    check,
    init,
    join,
    last_error,
    make_id,
    run_all,
    run_in_threads,
)

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

INVALID_ARGUMENT = 4
INVALID_USAGE = 5


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    clear()


def assert_refused(result: int | None, expected: int, words: str) -> None:
    assert result == expected
    assert words in last_error()
    assert any(words in text for text in violations())
    assert any(line[1] == "violation" and words in " ".join(line) for line in log())


def alone() -> Rank:
    return join(make_id(), 1, 0)


def memory(count: int = 4) -> np.ndarray:
    return np.full(count, 7.0, np.float32)


VERBS: dict[str, Callable[[Rank], int]] = {
    "send": lambda rank: rank.send(memory(), 0),
    "recv": lambda rank: rank.recv(memory(), 0),
    "broadcast": lambda rank: rank.broadcast(memory(), memory(), 0),
    "reduce": lambda rank: rank.reduce(memory(), memory(), "sum", 0),
    "all_reduce": lambda rank: rank.all_reduce(memory(), memory()),
    "reduce_scatter": lambda rank: rank.reduce_scatter(memory(), memory()),
    "all_gather": lambda rank: rank.all_gather(memory(), memory()),
    "split": lambda rank: nccl().ncclCommSplit(rank.comm, 0, 0, c_void_p(), None),
    "finalize": Rank.finalize,
    "destroy": Rank.destroy,
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("end", ["finalize", "destroy", "abort"])
def test_use_after_the_end(end: str, verb: str) -> None:
    rank = alone()
    check(getattr(rank, end)())
    if (end, verb) == ("finalize", "destroy"):
        check(rank.destroy())
        end = "destroy"
    words = {"finalize": "finalized", "destroy": "destroyed", "abort": "aborted"}[end]
    assert_refused(VERBS[verb](rank), INVALID_USAGE, f"{verb}: the communicator has been {words}")


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_abort_or_question_after_the_end(end: str) -> None:
    rank = alone()
    check(getattr(rank, end)())
    assert_refused(rank.abort(), INVALID_USAGE, "ended already")
    with pytest.raises(RuntimeError, match="no such communicator any more"):
        rank.async_error()


def test_no_communicator() -> None:
    rank = Rank(c_void_p(ctypes.addressof(make_config())), 0, 1)
    for verb in VERBS.values():
        assert_refused(verb(rank), INVALID_ARGUMENT, "no such communicator")
    assert_refused(rank.abort(), INVALID_ARGUMENT, "no such communicator")


@pytest.mark.parametrize("peer", [-1, 1])
@pytest.mark.parametrize("verb", ["send", "recv", "broadcast", "reduce"])
def test_rank_that_is_not_there(verb: str, peer: int) -> None:
    rank, x, y = alone(), memory(), memory()
    calls = {
        "send": lambda: rank.send(x, peer),
        "recv": lambda: rank.recv(y, peer),
        "broadcast": lambda: rank.broadcast(x, y, peer),
        "reduce": lambda: rank.reduce(x, y, "sum", peer),
    }
    assert_refused(calls[verb](), INVALID_ARGUMENT, f"no rank {peer} among 1")


@pytest.mark.parametrize("count", [0, 3])
def test_null_pointer(count: int) -> None:
    library, rank, y = nccl(), alone(), memory()
    comm, out = rank.comm, y.ctypes.data
    calls = [
        lambda: library.ncclBroadcast(None, out, count, 7, 0, comm, None),
        lambda: library.ncclBroadcast(out, None, count, 7, 0, comm, None),
        lambda: library.ncclReduce(out, None, count, 7, 0, 0, comm, None),
        lambda: library.ncclAllReduce(None, out, count, 7, 0, comm, None),
        lambda: library.ncclReduceScatter(out, None, count, 7, 0, comm, None),
        lambda: library.ncclAllGather(None, out, count, 7, comm, None),
    ]
    for call in calls:
        if count == 0:
            check(call())
        else:
            assert_refused(call(), INVALID_ARGUMENT, "a null pointer")


def test_unknown_dtype_reduction_and_stream() -> None:
    rank, x = alone(), memory()
    arguments = (x.ctypes.data, x.ctypes.data, x.size)
    for dtype in (-1, 10, 99):
        result = nccl().ncclAllReduce(*arguments, dtype, 0, rank.comm, None)
        assert_refused(result, INVALID_ARGUMENT, "unknown dtype")
    for op in (-1, 4):
        result = nccl().ncclAllReduce(*arguments, 7, op, rank.comm, None)
        assert_refused(result, INVALID_ARGUMENT, "unknown reduction")
    result = nccl().ncclAllReduce(*arguments, 7, 0, rank.comm, 12345)
    assert_refused(result, INVALID_ARGUMENT, "no such stream")


def test_buffers_that_overlap() -> None:
    rank, x = alone(), memory(9)
    assert_refused(rank.all_reduce(x[:8], x[1:]), INVALID_ARGUMENT, "overlap")
    assert_refused(rank.all_gather(x[1:], x[:8]), INVALID_ARGUMENT, "overlap")
    with Group() as group:
        check(rank.send(x[:4], 0))
        check(rank.recv(x[3:7], 0))
    assert_refused(group.result, INVALID_USAGE, "buffers of one group overlap")
    with Group() as group:
        check(rank.send(x[:4], 0))
        check(rank.recv(x[:4], 0))
    assert group.result == 0
    assert (x == 7).all()


@pytest.mark.parametrize("received", [None, 3, "int32"])
def test_message_to_oneself_without_its_receive(received: int | str | None) -> None:
    rank, x, y = alone(), memory(), memory(3)
    with Group() as group:
        check(rank.send(x, 0))
        if isinstance(received, int):
            check(rank.recv(y, 0))
        if isinstance(received, str):
            check(rank.recv(np.zeros(4, received), 0))
    assert_refused(group.result, INVALID_USAGE, "no equal receives in the same group")
    assert (y == 7).all()


def test_groups() -> None:
    rank, x, y = alone(), memory(), np.zeros(4, np.float32)
    assert_refused(nccl().ncclGroupEnd(), INVALID_USAGE, "no group is open")
    with Group() as group:
        check(rank.all_reduce(x, y))
        assert_refused(rank.send(x, 5), INVALID_ARGUMENT, "no rank 5")
        check(rank.all_reduce(x, y))
    assert group.result == INVALID_ARGUMENT
    assert (y == 0).all(), "a group with a call that failed does nothing"
    with Group() as outer:
        with Group() as inner:
            check(rank.all_reduce(x, y))
        assert inner.result == 0
        assert (y == 0).all(), "the outermost group decides"
    assert outer.result == 0
    assert (y == 7).all()


def test_group_left_open() -> None:
    rank = alone()

    def body() -> None:
        check(nccl().ncclGroupStart())
        check(rank.all_reduce(memory(), memory()))
        assert_refused(rank.destroy(), INVALID_USAGE, "a group with its operations is open")

    run_all([body])
    # The thread's own end may come a little after its join.
    for _ in range(1000):
        if any("a thread ended with an open group" in text for text in violations()):
            return
        threading.Event().wait(0.001)
    pytest.fail("nobody noticed")


def test_work_on_the_stream_of_an_open_group() -> None:
    rank, x, event = alone(), memory(), make("event")
    other = make("stream")
    with Group() as group:
        check(device().record_event(event, None))
        check(rank.all_reduce(x, x))
        for result in (
            device().record_event(event, None),
            device().copy(x.ctypes.data, x.ctypes.data, 4, None),
        ):
            assert result == 400
            assert "before the end of a group" in violations()[-1]
        check(device().record_event(event, other))
    assert group.result == 0


def test_one_thread_at_a_time() -> None:
    """A thread uses a communicator from its first call in a group to the end of the group."""
    rank, is_inside, may_end = alone(), threading.Event(), threading.Event()
    x, y = memory(), memory()

    def body() -> None:
        with Group() as group:
            check(rank.all_reduce(x, y))
            is_inside.set()
            assert may_end.wait(10)
        assert group.result == 0

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    assert is_inside.wait(10)
    assert_refused(rank.all_reduce(x, x), INVALID_USAGE, "another thread is using")
    may_end.set()
    thread.join(10)
    assert not thread.is_alive()
    check(rank.destroy())


def test_rank_that_has_destroyed_it() -> None:
    ended = threading.Event()

    def body(rank: Rank) -> None:
        if rank.rank == 2:
            check(rank.destroy())
            ended.set()
            return
        assert ended.wait(10)
        assert_refused(rank.send(memory(), 2), INVALID_USAGE, "rank 2 has destroyed it")
        assert_refused(rank.all_reduce(memory(), memory()), INVALID_USAGE, "rank 2 has destroyed")
        # Those that are left may go on with each other.
        check(rank.recv(memory(), 0) if rank.rank else rank.send(memory(), 1))
        check(rank.destroy())

    run_in_threads(3, body)


MISMATCHES: dict[str, Callable[[Rank, np.ndarray, np.ndarray], int]] = {
    "all_reduce of 4 float32, sum": lambda rank, x, y: rank.all_reduce(x, y),
    "all_reduce of 4 float32, max": lambda rank, x, y: rank.all_reduce(x, y, "max"),
    "all_reduce of 3 float32, sum": lambda rank, x, y: rank.all_reduce(x[:3], y[:3]),
    "all_reduce of 4 int32, sum": lambda rank, x, y: replace(rank, dtype="int32").all_reduce(x, y),
    "broadcast of 4 float32, root 0": lambda rank, x, y: rank.broadcast(x, y, 0),
    "broadcast of 4 float32, root 1": lambda rank, x, y: rank.broadcast(x, y, 1),
    "reduce of 4 float32, sum, root 1": lambda rank, x, y: rank.reduce(x, y, "sum", 1),
    "all_gather of 1 float32": lambda rank, x, y: rank.all_gather(x[:1], y),
    "reduce_scatter of 1 float32, sum": lambda rank, x, y: rank.reduce_scatter(x[:3], y[:1]),
}
NAMES = list(MISMATCHES)
PAIRS = list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_collectives_that_differ(first: str, second: str) -> None:
    def body(rank: Rank) -> None:
        x, y = memory(), np.zeros(4, np.float32)
        result = MISMATCHES[second if rank.rank == 1 else first](rank, x, y)
        assert result == INVALID_USAGE
        assert rank.async_error() == INVALID_USAGE
        assert first in last_error(rank)
        assert second in last_error(rank)
        assert (y == 0).all()
        assert rank.all_reduce(x, y) == INVALID_USAGE
        check(rank.abort())

    run_in_threads(3, body)
    assert any(first in text and second in text for text in violations())


@pytest.mark.parametrize("on_stream", [False, True])
@pytest.mark.parametrize(("count", "dtype"), [(3, "float32"), (5, "float32"), (4, "int32")])
def test_messages_that_differ(count: int, dtype: str, on_stream: bool) -> None:
    words = f"rank 0 sends {count} of {dtype}, and is expected to send 4 of float32"
    third_may_look = threading.Event()

    def body(rank: Rank) -> None:
        rank.stream = make("stream") if on_stream else None
        x, y = np.zeros(count, dtype), memory()
        if rank.rank < 2:
            result = rank.recv(y, 0) if rank.rank else rank.send(x, 1)
            assert result == (0 if on_stream else INVALID_USAGE)
        if rank.rank == 1:
            while rank.async_error() == 0:
                pass
            third_may_look.set()
        assert third_may_look.wait(10)
        assert rank.async_error() == INVALID_USAGE
        assert words in last_error(rank)
        assert (y == 7).all()

    run_in_threads(3, body)
    assert any(words in text for text in violations())


@pytest.mark.parametrize(
    ("size", "rank", "words"), [(0, 0, "rank 0 of 0"), (2, 2, "rank 2 of 2"), (65, 0, "of 65")]
)
def test_impossible_ranks(size: int, rank: int, words: str) -> None:
    assert_refused(init(make_id(), size, rank)[0], INVALID_ARGUMENT, words)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"magic": 1}, "magic"),
        ({"version": 0}, "no version"),
        ({"size": 8}, "no size"),
        ({"blocking": 2}, "neither blocking"),
        ({"min_ctas": 4, "max_ctas": 2}, "impossible numbers of CTAs"),
        ({"max_ctas": 0}, "impossible numbers of CTAs"),
    ],
)
def test_config(members: dict[str, int], words: str) -> None:
    config = make_config(**members)
    assert_refused(init(make_id(), 1, 0, config)[0], INVALID_ARGUMENT, words)
    result = nccl().ncclCommSplit(alone().comm, 0, 0, c_void_p(), ctypes.byref(config))
    assert_refused(result, INVALID_ARGUMENT, words)


def test_unique_ids() -> None:
    assert_refused(init(bytes(128), 1, 0)[0], INVALID_ARGUMENT, "none of the double's")
    used = make_id()
    check(join(used, 1, 0).destroy())
    assert init(used, 1, 0)[0] == INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("second", "words"), [((2, 0), "two ranks say"), ((3, 1), "another rank says there are")]
)
def test_ranks_that_do_not_fit(second: tuple[int, int], words: str) -> None:
    unique_id = make_id()
    results: list[Any] = run_all(
        [lambda: init(unique_id, 2, 0)[0], lambda: init(unique_id, *second)[0]]
    )
    assert 0 not in results
    assert any(words in text for text in violations())


def test_memory_that_is_not_nccls() -> None:
    rank, handle, x = alone(), c_void_p(), memory()
    assert_refused(nccl().ncclMemFree(x.ctypes.data), INVALID_ARGUMENT, "mem_free")
    assert_refused(nccl().ncclCommDeregister(rank.comm, 1), INVALID_ARGUMENT, "no such handle")
    allocated = c_void_p()
    check(nccl().ncclMemAlloc(ctypes.byref(allocated), 4096))
    check(nccl().ncclCommRegister(rank.comm, allocated, 4096, ctypes.byref(handle)))
    check(nccl().ncclCommDeregister(rank.comm, handle))
    check(nccl().ncclMemFree(allocated))
    assert_refused(nccl().ncclMemFree(allocated), INVALID_ARGUMENT, "mem_free")


def test_streams_are_asynchronous_and_keep_order() -> None:
    """One rank enqueues long before the other, and is not held up."""
    event = make("event")
    early = np.zeros(1000)

    def first(rank: Rank) -> None:
        rank.stream = make("stream")
        x = np.ones(1000)
        for _ in range(3):
            check(rank.all_reduce(x, x))
        check(device().copy(early.ctypes.data, x.ctypes.data, x.nbytes, rank.stream))
        check(device().record_event(event, rank.stream))
        assert not is_complete(event)
        assert rank.destroy() == 5
        peer_may_start.append(True)
        check(device().wait_event(None, event))
        assert is_complete(event)
        assert (early == 8).all()
        check(rank.destroy())

    def second(rank: Rank) -> None:
        while not peer_may_start:
            pass
        x = np.ones(1000)
        for _ in range(3):
            check(rank.all_reduce(x, x))

    peer_may_start: list[bool] = []
    run_in_threads(2, lambda rank: second(rank) if rank.rank else first(rank))
    assert "in flight" in violations()[0]
    clear()
