"""A loader on one rank, its batches on all: order, ends, errors, and prefetching."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpudist import stream_batches
from gpudist.errors import PartitionError, RemoteError
from gpudist.world.partition import Partition
from tests.batch.nests import assert_same
from tests.pool import distributed


def batches(count: int, start: int = 0) -> Iterator[Any]:
    for step in range(start, start + count):
        yield {"tokens": torch.arange(3 + 700 * (step % 3)), "step": step}


def loader_on(P: Partition, count: int, root: int = 0, start: int = 0) -> Iterator[Any] | None:
    return batches(count, start) if P.rank == root else None


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@distributed(ranks=3)
def test_all_batches_in_order(P_world: Partition, prefetch: int) -> None:
    for epoch in range(2):
        loader = loader_on(P_world, 7, root=1, start=epoch)
        stream = stream_batches(loader, P_world, root=1, prefetch=prefetch)
        got = []
        for batch in stream:
            got.append(batch)
            P_world.barrier()  # what the program does between two batches comes between them
        P_world.wire.wait()
        assert_same(got, list(batches(7, epoch)))
        with pytest.raises(StopIteration):
            next(stream)


@distributed(ranks=2)
def test_two_streams_by_turns(P_world: Partition) -> None:
    training = stream_batches(loader_on(P_world, 5), P_world)
    other = stream_batches(loader_on(P_world, 5, root=1, start=10), P_world, root=1)
    steps = [(a["step"], b["step"]) for a, b in zip(training, other, strict=True)]
    assert steps == [(i, 10 + i) for i in range(5)]


@distributed(ranks=4)
def test_each_row_has_a_loader(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([2, 2])
    row, column = P_x.index or (0, 0)
    loader = batches(3 + row, 100 * row) if column == 0 else None
    steps = [batch["step"] for batch in stream_batches(loader, P_x, axes=(1,))]
    assert steps == list(range(100 * row, 100 * row + 3 + row))


def failing(after: int) -> Iterator[Any]:
    yield from batches(after)
    raise OSError("disk gone")


@pytest.mark.parametrize("prefetch", [0, 2])
@distributed(ranks=3)
def test_loader_raises_for_all(P_world: Partition, prefetch: int) -> None:
    loader = failing(2) if P_world.rank == 0 else None
    stream = stream_batches(loader, P_world, prefetch=prefetch)
    assert [next(stream)["step"], next(stream)["step"]] == [0, 1]
    with pytest.raises(OSError if P_world.rank == 0 else RemoteError, match="disk gone"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)
    P_world.barrier()


@distributed(ranks=2)
def test_root_without_a_loader(P_world: Partition) -> None:
    for prefetch in (0, 1):
        expected = PartitionError if P_world.rank == 0 else RemoteError
        with pytest.raises(expected, match="the loader is None on the root"):
            next(stream_batches(None, P_world, prefetch=prefetch))


@distributed(ranks=2)
def test_workers_outside_get_nothing(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([1])
    assert len(list(stream_batches(batches(2), P))) == (2 if P.active else 0)


def loading_threads() -> int:
    return sum(thread.name == "gpudist batches" for thread in threading.enumerate())


def wait_until_none_load(limit_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while loading_threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert loading_threads() == 0


@distributed(ranks=1, transports=("loopback",))
def test_next_batch_is_loaded_meanwhile(P_world: Partition) -> None:
    loaded = [threading.Event() for _ in range(6)]

    def loader() -> Iterator[int]:
        for i, event in enumerate(loaded):
            event.set()
            yield i

    stream = stream_batches(loader(), P_world, prefetch=2)
    assert next(stream) == 0
    # Two wait to be taken, and the thread has a third.
    assert loaded[3].wait(10.0)
    assert not loaded[4].wait(0.1)
    stream.close()
    wait_until_none_load()
    with pytest.raises(StopIteration):
        next(stream)


@distributed(ranks=1, transports=("loopback",))
def test_abandoned_stream_ends_its_thread(P_world: Partition) -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    stream = stream_batches(endless(), P_world)
    assert next(stream) == 1
    assert loading_threads() == 1
    gone = weakref.ref(stream)
    del stream
    gc.collect()
    assert gone() is None
    wait_until_none_load()
