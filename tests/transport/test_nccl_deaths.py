"""Ranks that are killed, stop, raise or leave, over the doubles of NCCL."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpudist.capturing import CapturedStep
from gpudist.errors import CollectiveTimeout, GpudistError, PeerFailure, TransportError
from gpudist.ops.halo_exchange import HaloExchange
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world import runtime
from tests.doubles.graphs import Graph
from tests.doubles.nccl import clear, inject, violations
from tests.patience import allowed_s
from tests.transport.nccl_actions import (
    ACTIONS,
    Fate,
    all_sum_reduce,
    barrier,
    check_all_failed,
    fate_of,
    halo,
    repeat,
)
from tests.transport.worlds import Outcome, ProcessRanks, results

RANKS = 3
DEADLINE_S = 1.0
LONG_S = 20.0


@pytest.fixture(scope="module")
def mortals() -> Iterator[ProcessRanks]:
    """Processes of this file's own, since some of them are to die."""
    ranks = ProcessRanks(RANKS)
    ranks.run(RANKS, Transport.check, timeout_s=60, kind="nccl")
    yield ranks
    ranks.kill()


def fates_of(ended: list[Outcome], dead: int) -> list[Fate]:
    for rank, outcome in enumerate(ended):
        assert outcome.answered == (rank != dead), f"rank {rank}: {outcome}"
        assert outcome.error is None, f"rank {rank}: {outcome.error}"
    return [outcome.value for rank, outcome in enumerate(ended) if rank != dead]


def crash(transport: Transport, name: str, rank: int, after: int) -> Fate:
    P_world, action = runtime.world_of(transport), ACTIONS[name]
    clear()

    def play() -> None:
        barrier(P_world)
        if transport.rank == rank:
            inject("crash", -1, after)
        repeat(P_world, action, None)

    return fate_of(transport, play)


@pytest.mark.parametrize(
    ("name", "rank", "after"),
    [("halo", 0, 0), ("broadcast", 1, 1), ("all_sum_reduce", 2, 3), ("overlapped", 1, 9)],
)
def test_a_rank_that_dies_in_an_operation_is_named(
    mortals: ProcessRanks, name: str, rank: int, after: int
) -> None:
    ended = mortals.run(RANKS, crash, name, rank, after, timeout_s=LONG_S, kind="nccl")
    mortals.revive()
    fates = fates_of(ended, rank)
    texts = check_all_failed(fates, DEADLINE_S, PeerFailure)
    survivors = [survivor for survivor in range(RANKS) if survivor != rank]
    for survivor, text in zip(survivors, texts, strict=True):
        last = f"the process of rank {rank} has ended; the last operation of rank {survivor} was '"
        assert text.startswith(last), text
    assert [getattr(fate.error, "rank", None) for fate in fates] == [rank] * (RANKS - 1)


def signalled(transport: Transport, number: int, rank: int) -> Fate:
    P_world = runtime.world_of(transport)
    clear()

    def play() -> None:
        halo(P_world)
        if transport.rank == rank:
            os.kill(os.getpid(), number)
        halo(P_world)

    return fate_of(transport, play)


class _OfDouble:
    """Recorder whose graph is one of the double's."""

    def __init__(self) -> None:
        self._graph = Graph()

    def run(self, call: Callable[[], Any]) -> Any:
        return call()

    def record(self, call: Callable[[], Any]) -> Any:
        with self._graph:
            return call()

    def replay(self) -> None:
        self._graph.launch()

    def close(self) -> None:
        self._graph.destroy()


def replayed(transport: Transport, how: str) -> Fate:
    """Replay a captured halo exchange until it raises, after rank 1 has stopped doing so."""
    P_world = runtime.world_of(transport)
    clear()
    x = torch.zeros(4)
    operator = HaloExchange(P_world.grid(RANKS), halo=[(1, 1)])
    step = CapturedStep(operator, P_world, _OfDouble(), 1)
    for _ in range(3):
        step(x)
    transport.wait()

    def play() -> None:
        if transport.rank == 1:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises":
                transport.abort(Failure("TransportError", 1, "rank 1 raises in its loop"))
                P_world.check()
            for _ in range(500):
                P_world.check()
                time.sleep(0.02)
        for _ in range(500):
            step(x)
            time.sleep(0.02)

    return fate_of(transport, play)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("dies", PeerFailure, "the process of rank 1 has ended"),
        ("raises", TransportError, "rank 1 raises in its loop"),
        ("waits", CollectiveTimeout, "captured step"),
    ],
)
def test_a_captured_step_raises_the_failure_of_another_rank(
    mortals: ProcessRanks, how: str, kind: type[GpudistError], text: str
) -> None:
    limit_s = DEADLINE_S if how == "waits" else LONG_S
    ended = mortals.run(RANKS, replayed, how, timeout_s=limit_s, kind="nccl")
    if how == "dies":
        mortals.revive()
    fates = fates_of(ended, 1 if how == "dies" else RANKS)
    assert all(text in each for each in check_all_failed(fates, DEADLINE_S + 1, kind))


def test_a_stopped_rank_is_a_timeout(mortals: ProcessRanks) -> None:
    ended = mortals.run(
        RANKS, signalled, signal.SIGSTOP, 1, timeout_s=DEADLINE_S, kind="nccl", stops=1
    )
    texts = check_all_failed(fates_of(ended, 1), DEADLINE_S, CollectiveTimeout)
    assert len(set(texts)) == 1
    assert "rank 1: no answer" in texts[0]
    # When it goes on, it learns what has become of the others.
    os.kill(mortals.processes[1].pid, signal.SIGCONT)
    late = mortals.answer(1).value
    assert isinstance(late.error, CollectiveTimeout) and str(late.error) == texts[0]


class Mistake(Exception):
    pass


def raise_on_one(transport: Transport, aborts: bool) -> Fate:
    P_world = runtime.world_of(transport)
    clear()
    if transport.rank != 1:
        return fate_of(transport, lambda: repeat(P_world, halo, None))
    halo(P_world)
    if aborts:
        transport.abort(Failure.from_exception(Mistake("of the user"), 1))
        return fate_of(transport, lambda: halo(P_world))
    transport.close()
    with pytest.raises(TransportError, match="transport of rank 1 was closed"):
        halo(P_world)
    return Fate(misuses=violations())


def test_a_rank_that_raises_ends_the_others() -> None:
    fates = results("nccl", RANKS, raise_on_one, True, timeout_s=LONG_S)
    cause = "rank 1 raised Mistake: of the user"
    here, victim, there = check_all_failed(fates, DEADLINE_S, PeerFailure)
    assert victim == f"the world has ended, no operation is possible; its first error: {cause}"
    for rank, text in ((0, here), (2, there)):
        where = f"the last operation of rank {rank} was 'halo_exchange on [1, 3] of [4, 18]"
        assert text.startswith(f"{cause}; {where}"), text


def test_a_rank_that_leaves_too_early() -> None:
    """Other ranks wait until the deadline, which reports that it left, or NCCL detects it."""
    fates = results("nccl", RANKS, raise_on_one, False, timeout_s=DEADLINE_S)
    assert fates.pop(1) == Fate()
    for fate in fates:
        assert isinstance(fate.error, (CollectiveTimeout, TransportError)), fate
        text = str(fate.error)
        assert "rank 1 has destroyed it" in text or "it has left the world" in text
        assert fate.after_s < DEADLINE_S + 1


def leave_first(transport: Transport) -> list[str]:
    """The last rank ends its part; the others go on without it, and its process ends for them."""
    P_world = runtime.world_of(transport)
    P_rest = P_world.create_partition_inclusive(range(transport.size - 1))
    all_sum_reduce(P_world)
    if not P_rest.active:
        transport.close()
        return violations()
    time.sleep(0.3)
    for _ in range(5):
        P_rest.barrier()
        assert halo(P_rest).shape == (4, 9)
    transport.close()
    return violations()


def test_others_go_on_without_a_rank_that_left() -> None:
    assert results("nccl", RANKS, leave_first, timeout_s=LONG_S) == [[]] * RANKS


def leave_and_exit(transport: Transport) -> str:
    P_world = runtime.world_of(transport)
    P_rest = P_world.create_partition_inclusive([0, 2])
    barrier(P_world)
    if transport.rank == 1:
        transport.close()
        os._exit(0)
    time.sleep(0.3)
    for _ in range(5):
        P_rest.barrier()
        time.sleep(0.05)
    transport.check()
    return transport.name


def test_the_end_of_a_process_that_has_left_is_no_failure(mortals: ProcessRanks) -> None:
    ended = mortals.run(RANKS, leave_and_exit, timeout_s=LONG_S, kind="nccl")
    mortals.revive()
    assert [ended[rank].value for rank in (0, 2)] == ["nccl", "nccl"], ended


def kill_while_joining(transport: Transport, rank: int) -> Fate:
    """A second world, of which one rank ends before its communicator is made."""
    clear()
    assert isinstance(transport, NcclTransport)
    store, prefix = transport.store, f"{transport.prefix}/second"
    begin_s = time.monotonic()
    fate = Fate()
    try:
        if transport.rank == rank:
            inject("stall_init", rank)
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
        runtime.connect("nccl", store, transport.rank, transport.size, LONG_S, prefix)
    except GpudistError as error:
        fate.error = error.with_traceback(None)
    fate.after_s = time.monotonic() - begin_s
    return fate


def test_a_rank_that_dies_while_all_join_is_named(mortals: ProcessRanks) -> None:
    ended = mortals.run(RANKS, kill_while_joining, 2, timeout_s=LONG_S, kind="nccl")
    mortals.revive()
    for fate in fates_of(ended, 2):
        assert isinstance(fate.error, PeerFailure) and fate.error.rank == 2, fate
        assert fate.after_s < allowed_s(0.3 + DEADLINE_S + 1)


def lose_the_store(transport: Transport, number: int, timeout_s: float) -> Fate:
    """Lose the store of a second world: rank 0, which serves it, dies or stops."""
    assert isinstance(transport, NcclTransport)
    clear()
    key = f"{transport.prefix}/port"
    if transport.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        transport.store.set(key, str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(transport.store.get(key)), is_master=False)
    second = runtime.connect("nccl", store, transport.rank, transport.size, timeout_s, "second")
    P_second = runtime.world_of(second)
    begun_s: list[float] = []

    def play() -> None:
        halo(P_second)
        P_second.barrier()
        begun_s.append(time.monotonic())
        if transport.rank == 0:
            time.sleep(0.2)
            os.kill(os.getpid(), number)
        repeat(P_second, halo, None)

    return fate_of(second, play, begun_s=begun_s)


def test_a_dead_rank_is_named_also_where_it_served_the_store(mortals: ProcessRanks) -> None:
    ended = mortals.run(
        RANKS, lose_the_store, signal.SIGKILL, LONG_S, timeout_s=LONG_S, kind="nccl"
    )
    mortals.revive()
    fates = fates_of(ended, 0)
    check_all_failed(fates, 1 + DEADLINE_S, PeerFailure)
    assert [getattr(fate.error, "rank", None) for fate in fates] == [0] * (RANKS - 1)


def test_a_store_that_hangs_does_not_hide_the_deadline(mortals: ProcessRanks) -> None:
    ended = mortals.run(
        RANKS, lose_the_store, signal.SIGSTOP, DEADLINE_S, timeout_s=LONG_S, kind="nccl", stops=0
    )
    os.kill(mortals.processes[0].pid, signal.SIGKILL)
    mortals.processes[0].join()
    mortals.revive()
    for fate in fates_of(ended, 0):
        assert isinstance(fate.error, CollectiveTimeout), fate
        assert fate.after_s < DEADLINE_S + 1.2  # the other rank's report comes first, perhaps
        assert fate.misuses == []
