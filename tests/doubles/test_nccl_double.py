"""Every operation of the NCCL double against NumPy, over threads and over processes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce

import numpy as np
import pytest

from tests.doubles.build import NoCompiler, library
from tests.doubles.device import device, finish, is_complete, make
from tests.doubles.nccl import DTYPES, clear, configure, log, nccl, violations
from tests.doubles.ranks import Group, Rank, check, run_in_processes, run_in_threads

try:
    library()
except NoCompiler as reason:
    pytest.skip(str(reason), allow_module_level=True)

# Nothing, less than a round, and several rounds with a rest.
COUNTS = (0, 1, 1000, 50_001)
FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    clear()
    yield
    assert violations() == []


def values(rank: int, shape: int | tuple[int, ...], dtype: str) -> np.ndarray:
    """Return values of many magnitudes, whose sum depends on the order of additions."""
    generator = np.random.default_rng(rank)
    x = generator.standard_normal(shape) * 10.0 ** generator.integers(-2, 3, shape)
    if dtype == "bfloat16":
        return round_to_bfloat16(x.astype(np.float32))
    with np.errstate(invalid="ignore"):
        return x.astype(np.int64).astype(dtype) if "int" in dtype else x.astype(dtype)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Return the upper half of a float32, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(
        np.uint16
    )


def reduced(parts: list[np.ndarray], dtype: str, op: str) -> np.ndarray:
    """Reduce in ascending order of ranks; 16-bit floats are added in float32 and rounded once."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in parts]
            return round_to_bfloat16(np.asarray(reduce(FUNCTIONS[op], wide)))
        if dtype == "float16":
            wide = [x.astype(np.float32) for x in parts]
            return np.asarray(reduce(FUNCTIONS[op], wide)).astype(np.float16)
        return np.asarray(reduce(FUNCTIONS[op], parts))


def same_bits(x: np.ndarray, y: np.ndarray) -> None:
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))


def carry_out_collectives(rank: Rank, dtype: str, op: str, count: int) -> None:
    rank = replace(rank, dtype=dtype)
    size, root = rank.size, rank.size - 1
    inputs = [values(r, (size, count), dtype) for r in range(size)]
    mine = inputs[rank.rank]
    total = reduced(inputs, dtype, op)

    y = np.zeros_like(mine)
    check(rank.all_reduce(mine, y, op))
    same_bits(y, total)
    y = np.zeros_like(mine)
    check(rank.reduce(mine, y if rank.rank == root else None, op, root))
    same_bits(y, total if rank.rank == root else np.zeros_like(total))
    block = np.zeros(count, mine.dtype)
    check(rank.reduce_scatter(mine, block, op))
    same_bits(block, total[rank.rank])
    gathered = np.zeros_like(mine)
    check(rank.all_gather(mine[0], gathered))
    same_bits(gathered, np.stack([x[0] for x in inputs]))
    y = np.zeros_like(mine)
    check(rank.broadcast(mine if rank.rank == root else None, y, root))
    same_bits(y, inputs[root])


def carry_out_in_place(rank: Rank, count: int) -> None:
    inputs = [values(r, (rank.size, count), "float32") for r in range(rank.size)]
    total = reduced(inputs, "float32", "sum")

    x = inputs[rank.rank].copy()
    check(rank.all_reduce(x, x))
    same_bits(x, total)
    x = inputs[rank.rank].copy()
    check(rank.reduce(x, x, "sum", 0))
    same_bits(x, total if rank.rank == 0 else inputs[rank.rank])
    x = inputs[rank.rank].copy()
    check(rank.reduce_scatter(x, x[rank.rank]))
    same_bits(x[rank.rank], total[rank.rank])
    x = inputs[rank.rank].copy()
    check(rank.all_gather(x[rank.rank], x))
    same_bits(x, np.stack([inputs[r][r] for r in range(rank.size)]))
    x = inputs[rank.rank].copy()
    check(rank.broadcast(x, x, 1))
    same_bits(x, inputs[1])


def exchange(rank: Rank, count: int) -> None:
    """Two messages of different sizes from everyone to everyone, oneself included."""
    x = [values(100 * rank.rank + peer, count + peer, "float64") for peer in range(rank.size)]
    y = [np.zeros(count + rank.rank) for _ in range(rank.size)]
    z = [np.zeros(3, np.uint8) for _ in range(rank.size)]
    marks = np.full(3, rank.rank, np.uint8)
    with Group() as group:
        for peer in range(rank.size):
            check(rank.send(x[peer], peer))
            check(rank.send(marks, peer))
        for peer in reversed(range(rank.size)):
            check(rank.recv(y[peer], peer))
            check(rank.recv(z[peer], peer))
    assert group.result == 0
    for peer in range(rank.size):
        same_bits(y[peer], values(100 * peer + rank.rank, count + rank.rank, "float64"))
        same_bits(z[peer], np.full(3, peer, np.uint8))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("op", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives(dtype: str, op: str) -> None:
    def body(rank: Rank) -> None:
        for count in COUNTS[:3]:
            carry_out_collectives(rank, dtype, op, count)
        check(rank.destroy())

    run_in_threads(3, body)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_collectives_of_many_rounds(size: int) -> None:
    run_in_threads(size, lambda rank: carry_out_collectives(rank, "float32", "sum", COUNTS[3]))


@pytest.mark.parametrize("count", COUNTS)
def test_collectives_in_place(count: int) -> None:
    run_in_threads(3, lambda rank: carry_out_in_place(rank, count))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_messages(size: int, count: int) -> None:
    run_in_threads(size, lambda rank: exchange(rank, count))


def everything(rank: Rank) -> list[str]:
    """Return a body for processes."""
    for count in COUNTS:
        exchange(rank, count)
        carry_out_collectives(rank, "bfloat16", "sum", count)
    part = rank.split(rank.rank % 2, -rank.rank)
    assert part is not None
    exchange(part, 10)
    check(part.destroy())
    check(rank.destroy())
    return violations()


def test_processes() -> None:
    assert run_in_processes(5, everything) == [[]] * 5


def test_split_orders_by_key_and_leaves_out() -> None:
    def body(rank: Rank) -> tuple[int, int, int] | None:
        part = rank.split(-1 if rank.rank == 2 else rank.rank % 2, -rank.rank)
        if part is None:
            return None
        y = np.zeros(1, np.int64)
        check(part.all_reduce(np.full(1, 10**rank.rank), y))
        again = part.split(0, 0)
        assert again is not None
        carry_out_in_place(again, 100)
        return part.rank, part.size, int(y[0])

    assert run_in_threads(5, body) == [
        (1, 2, 10001),
        (1, 2, 1010),
        None,
        (0, 2, 1010),
        (0, 2, 10001),
    ]


def test_a_group_of_several_communicators() -> None:
    """Messages of the first run together, though a collective was called between them."""

    def body(rank: Rank) -> None:
        part = rank.split(rank.rank // 2, 0)
        assert part is not None
        x = np.full(1, float(rank.rank))
        other, total, whole = np.zeros(1), np.zeros(1), np.zeros(1)
        with Group() as group:
            check(rank.send(x, rank.rank ^ 1))
            check(part.all_reduce(x, total))
            check(rank.all_reduce(x, whole))
            check(rank.recv(other, rank.rank ^ 1))
        assert group.result == 0
        assert (other[0], total[0], whole[0]) == (rank.rank ^ 1, 4 * (rank.rank // 2) + 1, 6)

    run_in_threads(4, body)


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


def test_order_of_a_communicator_holds_over_streams() -> None:
    """The second operation is on a stream that could begin at once."""

    def body(rank: Rank) -> None:
        part = rank.split(0, 0)
        assert part is not None
        x, y, z, mark = np.ones(1), np.zeros(1), np.zeros(2), np.zeros(1)
        held, free = make("stream"), make("stream")
        if rank.rank == 0:
            check(replace(part, stream=held).recv(mark, 1))
        check(replace(rank, stream=held).all_reduce(x, y))
        check(replace(rank, stream=free).all_gather(x, z))
        if rank.rank == 1:
            time.sleep(0.02)
            check(part.send(mark, 0))
        finish(held)
        finish(free)
        assert (y[0], z.tolist()) == (2, [1, 1])

    run_in_threads(2, body)


def test_log_tells_what_was_called() -> None:
    def body(rank: Rank) -> None:
        x = np.zeros(7, np.float16)
        if rank.rank == 1:
            rank.stream = make("stream")
        with Group():
            (rank.recv if rank.rank else rank.send)(x, 1 - rank.rank)
        check(rank.reduce(x, x, "max", 1))
        finish(rank.stream)

    run_in_threads(2, body)
    lines = [line[2:] for line in log() if line[3] in ("send", "recv", "reduce")]
    streams = {line[5] for line in lines if line[0] == "1"}
    assert len(streams) == 1
    assert "0" not in streams
    stream = streams.pop()
    assert sorted(lines) == [
        ["0", "reduce", "7", "float16", "1", "0", "0", "max"],
        ["0", "send", "7", "float16", "1", "0", "1"],
        ["1", "recv", "7", "float16", "0", stream, "1"],
        ["1", "reduce", "7", "float16", "1", stream, "0", "max"],
    ]
    assert len({line[1] for line in log() if line[3] == "reduce"}) == 1


def test_version_is_what_a_test_says() -> None:
    version = ctypes.c_int()
    check(nccl().ncclGetVersion(ctypes.byref(version)))
    assert version.value == 22703
    configure("version", 21805)
    check(nccl().ncclGetVersion(ctypes.byref(version)))
    assert version.value == 21805
