"""Errors of ranks when one of them disagrees, raises, dies, stops, or never arrives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpudist.errors import CollectiveTimeout, PeerFailure, PlanMismatch, TransportError
from gpudist.geometry.boxes import Stage
from gpudist.transport.base import Signature, Transport
from gpudist.transport.flight_recorder import Activity, OperatorTotals
from gpudist.transport.gloo import GlooTransport
from tests import warm
from tests.patience import allowed_s
from tests.transport.worlds import Outcome, ProcessRanks, outcomes

every = pytest.mark.parametrize("kind", ["loopback", "gloo", "host"])
processes = pytest.mark.parametrize("kind", ["gloo", "host"])


@pytest.fixture
def four_ranks() -> Iterator[ProcessRanks]:
    """Processes of the test's own, since one of them is to die."""
    ranks = ProcessRanks(4)
    yield ranks
    ranks.kill()


def ring(transport: Transport, label: str, cells: int = 4) -> None:
    """One message from each rank to the next."""
    everyone = transport.communicator(range(transport.size))
    received = torch.zeros(cells)
    signature = Signature(label, label.encode().ljust(16)[:16])
    with transport.group(signature):
        everyone.send(torch.ones(cells), (everyone.rank + 1) % everyone.size)
        everyone.recv(received, (everyone.rank - 1) % everyone.size)


# A wire may hold a message until it is asked for, so that a failure comes round the ring in turns.
def other_operation(transport: Transport) -> None:
    ring(transport, "warm up")
    ring(transport, "halo exchange" if transport.rank == 1 else "repartition")
    for _ in range(4):
        ring(transport, "afterwards")


def other_size(transport: Transport) -> None:
    ring(transport, "halo exchange", cells=2000 if transport.rank == 1 else 3)
    for _ in range(4):
        ring(transport, "afterwards")


def errors_of(ended: list[Outcome], kind: type[BaseException]) -> list[str]:
    for rank, outcome in enumerate(ended):
        assert isinstance(outcome.error, kind), f"rank {rank}: {outcome}"
    return [str(outcome.error) for outcome in ended]


@every
def test_other_operation_is_a_plan_mismatch_everywhere(kind: str) -> None:
    texts = errors_of(outcomes(kind, 4, other_operation), PlanMismatch)
    assert len(set(texts)) == 1
    assert "'halo exchange'" in texts[0] and "'repartition'" in texts[0]
    assert "rank 1" in texts[0] and "16 bytes" in texts[0]


@every
def test_other_size_is_a_plan_mismatch_everywhere(kind: str) -> None:
    texts = errors_of(outcomes(kind, 4, other_size), PlanMismatch)
    assert len(set(texts)) == 1
    assert "12 bytes" in texts[0] and "8000 bytes" in texts[0] and "rank 1" in texts[0]


def raise_on_two(transport: Transport) -> None:
    ring(transport, "warm up")
    if transport.rank == 2:
        raise ZeroDivisionError("a mistake of the user")
    # A wire may hold a message until it is asked for, so that the failure comes round the ring.
    for _ in range(4):
        ring(transport, "the next thing")


@every
def test_an_exception_on_one_rank_names_it_on_all_others(kind: str) -> None:
    ended = outcomes(kind, 4, raise_on_two)
    assert isinstance(ended.pop(2).error, ZeroDivisionError)
    for text in errors_of(ended, PeerFailure):
        assert "rank 2 raised ZeroDivisionError: a mistake of the user" in text
    assert [getattr(outcome.error, "rank", None) for outcome in ended] == [2, 2, 2]


def signal_on_three(transport: Transport, number: int, child_s: float = 0.0) -> None:
    ring(transport, "warm up")
    if transport.rank == 3:
        if child_s and os.fork() == 0:
            time.sleep(child_s)
            os._exit(0)
        os.kill(os.getpid(), number)
    # Only rank 2 waits for rank 3; rank 1 waits for 2 and rank 0 for 1.
    chain = transport.communicator(range(4))
    x = torch.zeros(1)
    if transport.rank < 3:
        chain.recv(x, transport.rank + 1)
    if transport.rank > 0:
        chain.send(x, transport.rank - 1)


@pytest.mark.parametrize(("kind", "child_s"), [("gloo", 0.0), ("host", 0.0), ("gloo", 4.0)])
def test_a_killed_rank_is_named_on_every_survivor(
    four_ranks: ProcessRanks, kind: str, child_s: float
) -> None:
    """Its child may live on, and holds its sockets."""
    four_ranks.run(4, ring, "start the processes", timeout_s=20, kind=kind)
    start_s = time.monotonic()
    ended = four_ranks.run(4, signal_on_three, signal.SIGKILL, child_s, timeout_s=20, kind=kind)
    assert not ended.pop(3).answered
    for text in errors_of(ended, PeerFailure):
        how = r"process of rank 3 has ended while rank 2 was in 'recv|rank 3 \(process \d+\) died"
        assert re.search(how, text)
    assert [getattr(outcome.error, "rank", None) for outcome in ended] == [3, 3, 3]
    assert max(o.end_s for o in ended) - start_s < allowed_s(2)


@processes
def test_a_stopped_rank_is_a_timeout_with_every_ranks_last_operations(
    four_ranks: ProcessRanks, kind: str
) -> None:
    four_ranks.run(4, ring, "start the processes", timeout_s=20, kind=kind)
    start_s = time.monotonic()
    ended = four_ranks.run(4, signal_on_three, signal.SIGSTOP, timeout_s=2, stops=3, kind=kind)
    assert not ended.pop(3).answered
    texts = errors_of(ended, CollectiveTimeout)
    assert len(set(texts)) == 1
    assert "after 2 s" in texts[0]
    assert re.search(r"rank 3: .*; its process (\d+) is stopped \(kill -CONT \1 ", texts[0])
    if kind == "gloo":
        assert "rank 0: #0 connect" in texts[0] and "rank 1: #0 connect" in texts[0]
        assert "rank 3: no answer" in texts[0]
    else:
        # Activities are in shared memory, so that of a stopped rank can be read too.
        assert "rank 2: #2 recv from rank 3" in texts[0] and "rank 3: #1 warm up" in texts[0]
    assert 2 <= min(o.end_s for o in ended) - start_s < allowed_s(4)


def test_a_rank_that_never_comes_is_named() -> None:
    program = """
        import torch.distributed as dist
        from gpudist.transport.gloo import GlooTransport
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        GlooTransport(store, 0, 3, 0.3, prefix="world", same_node=True)
    """
    ended = subprocess.run(
        [warm.python(), "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    assert "CollectiveTimeout: after 0.3 s rank 0 is still missing ranks [1, 2]" in ended.stderr


def test_a_process_with_an_abandoned_wait_exits_in_silence() -> None:
    program = """
        import threading, torch, torch.distributed as dist
        from gpudist.errors import CollectiveTimeout
        from gpudist.transport.gloo import GlooTransport
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

        def make(rank):
            made[rank] = GlooTransport(store.clone(), rank, 2, 0.5, prefix="world", same_node=True)

        made = {}
        threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        try:
            made[0].communicator([0, 1]).recv(torch.zeros(10000), 1)
        except CollectiveTimeout as error:
            print(error)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "was not complete after 0.5 s" in ended.stdout


def test_what_belongs_in_a_group_or_in_a_transport_that_packs() -> None:
    alone = GlooTransport(dist.HashStore(), 0, 1, 5.0, prefix="alone", same_node=True)
    with pytest.raises(TransportError, match=r"inside `with transport\.group"):
        alone.queue_message(True, torch.zeros(1, dtype=torch.uint8), 0)
    assert not alone.packs
    activity = Activity("a test", OperatorTotals("a test", "a partition"))
    bound: list[Callable[[], object]] = [
        lambda: alone.bind_stage(Stage(None, None), [0], 0, [], torch.float32, 0.0, False),
        lambda: alone.bind_steps(Signature("a test", bytes(16)), None, []),
        lambda: alone.start_stages(Signature("a test", bytes(16)), [], activity),
    ]
    with pytest.raises(NotImplementedError, match="the gloo transport does not carry pieces"):
        alone.start_pieces(Signature("a test", bytes(16)), True, [], [])
    for bind in bound:
        with pytest.raises(NotImplementedError, match="the gloo transport does not pack"):
            bind()


class BrokenGloo:
    """A connection that breaks between the header of a message and its payload."""

    def recv(self, *_: object) -> None:
        raise RuntimeError("Connection reset by peer")


def lose_the_payload(transport: Transport) -> str:
    assert isinstance(transport, GlooTransport)
    everyone = transport.communicator(range(transport.size))
    if transport.rank == 1:
        with suppress(PeerFailure), transport.group(Signature("a long message", bytes(16))):
            everyone.send(torch.zeros(100_000), 0)
        return ""
    complete, whole = transport._complete, transport._gloo

    def break_then_complete(messages: Any) -> None:
        for message in messages:
            message.works[0].wait()
            message.works[0] = CompleteWork()
        transport._gloo = BrokenGloo()
        complete(messages)

    transport._complete = break_then_complete
    with (
        pytest.raises(PeerFailure, match="rank 1 closed its connection to rank 0") as caught,
        transport.group(Signature("a long message", bytes(16))),
    ):
        everyone.recv(torch.zeros(100_000), 1)
    assert whole is not None  # or the connection would be closed
    return str(caught.value.rank)


class CompleteWork:
    def wait(self, *_: object) -> None:
        pass


def test_a_connection_that_breaks_after_the_header_names_the_peer() -> None:
    ended = outcomes("gloo", 2, lose_the_payload)
    assert [outcome.value for outcome in ended] == ["1", ""], ended
