"""Ranks that are killed, interrupted, leave early, or outnumber the cores."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from gpudist import broadcast, halo_exchange
from gpudist.errors import PeerFailure, ShapeError
from gpudist.transport.base import Signature
from gpudist.transport.failure.channel import Failure
from gpudist.transport.host.meeting import HostMeeting
from gpudist.transport.loopback import LoopbackTransport, LoopbackWorld
from gpudist.world.partition import Partition
from tests.doubles import use_doubles
from tests.faults.chaos.points import calls
from tests.faults.ranks import Ranks
from tests.patience import allowed_s

SIGNATURE = Signature("a test", bytes(16))


def wait_for_last(P_world: Partition) -> None:
    """All but the last wait for its message."""
    # Also where the tests run in the background of a shell, which has its children ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if P_world.rank != P_world.size - 1:
        with P_world.wire.group(SIGNATURE):
            P_world.communicator.recv(torch.zeros(1), P_world.size - 1)
    else:
        time.sleep(30)


def test_control_c_ends_a_waiting_rank() -> None:
    with Ranks(2, wait_for_last) as ranks:
        time.sleep(0.2)
        start_s = ranks.kill(0, signal.SIGINT)
        answer = ranks.ends[0].recv()
        assert isinstance(answer.error, KeyboardInterrupt)
        assert answer.end_s - start_s < allowed_s(1)
        ranks.kill(1)


def send_and_leave(P_world: Partition) -> list[bool]:
    """Rank 1 sends twice and ends before rank 0 receives the second message."""
    wire, pair = P_world.wire, P_world.communicator
    first, second = torch.full((100_000,), 1.0), torch.full((50_000,), 2.0)
    if P_world.rank == 1:
        for x in (first, second):
            with wire.group(SIGNATURE):
                pair.send(x, 0)
        return []
    received: list[bool] = []
    for x in (first, second):
        y = torch.zeros_like(x)
        with wire.group(SIGNATURE):
            pair.recv(y, 1)
        received.append(torch.equal(x, y))
        time.sleep(0.5)
    with (
        pytest.raises(PeerFailure, match=r"rank 1 .*has left the world") as caught,
        wire.group(SIGNATURE),
    ):
        pair.recv(torch.zeros(1), 1)
    return [*received, caught.value.rank == 1]


def test_what_a_rank_sent_before_it_left_is_received() -> None:
    with Ranks(2, send_and_leave) as ranks:
        leaver = ranks.ends[1].recv()
        assert (leaver.error, leaver.leftovers) == (None, [])
        ranks.ends[1].close()
        assert ranks.ends[0].recv().value == [True, True, True]


def fail_at_length(P_world: Partition) -> None:
    if P_world.rank == 0:
        P_world.wire.abort(Failure("ShapeError", 0, "cells: " + "\u00e4" * 20_000))
        return
    with P_world.wire.group(SIGNATURE):
        P_world.communicator.recv(torch.zeros(1), 0)


def test_a_long_cause_is_cut_to_fit() -> None:
    with Ranks(2, fail_at_length) as ranks:
        error = ranks.answers()[1].error
        assert isinstance(error, ShapeError)
        assert str(error).startswith("cells: \u00e4\u00e4")


def go_round(P_world: Partition, steps: int) -> float:
    P_ring = P_world.create_cartesian_topology_partition([P_world.size])
    x = torch.tensor([float(P_ring.rank or 0)])
    for _ in range(steps):
        x = halo_exchange(x, P_ring, halo=[(1, -1)], periodic=True, global_shape=[P_world.size])
    return x.item()


def test_more_ranks_than_cores_make_progress() -> None:
    with Ranks(16, go_round, 40) as ranks:
        start_s = time.monotonic()
        answers = ranks.answers()
        assert time.monotonic() - start_s < allowed_s(20)
    assert [answers[rank].value for rank in range(16)] == [(rank - 40) % 16 for rank in range(16)]
    assert not any(answer.leftovers for answer in answers.values())


held: list[Partition] = []


def use_and_hold(P_world: Partition) -> float:
    """A caller may hold a partition for as long as it likes."""
    held.append(P_world)
    P_root = P_world.create_partition_inclusive([0])
    x = torch.ones(3) if P_root.active else torch.ones(0)
    y = broadcast(x, P_root, P_world)
    P_world.wire.wait()
    return y.sum().item()


@pytest.mark.parametrize("transport", ["host", "gloo", "nccl"])
def test_a_closed_transport_holds_nothing_open(transport: str) -> None:
    use_doubles()
    with Ranks(2, use_and_hold, transport=transport, store_rank=None) as ranks:
        answers = ranks.answers()
    assert [(answers[rank].value, answers[rank].leftovers) for rank in (0, 1)] == [(3.0, [])] * 2


def die_when_told(rank: int) -> None:
    """The address is in the store, and the others may not have mapped it."""
    if rank == 1:
        calls(HostMeeting, "_await", before=lambda: os.kill(os.getpid(), signal.SIGKILL))


def do_nothing(P_world: Partition) -> None:
    pass


def test_a_rank_that_dies_while_all_join_is_named() -> None:
    with Ranks(3, do_nothing, before=die_when_told) as ranks:
        start_s = time.monotonic()
        answers = ranks.answers()
        pid = ranks.pid(1)
    assert sorted(answers) == [0, 2]
    for rank, answer in answers.items():
        cause = f"rank 1 (process {pid}) died while rank {rank} was in 'connect 3 ranks'"
        assert isinstance(answer.error, PeerFailure) and answer.error.rank == 1, answer
        assert str(answer.error) == cause
        assert answer.end_s - start_s < allowed_s(10) and answer.leftovers == []


def lose_the_store(P_world: Partition) -> None:
    P_world.barrier()
    if P_world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    P_world.barrier()


@pytest.mark.parametrize("transport", ["host", "gloo", "nccl"])
def test_a_rank_whose_death_ends_the_store_is_named(transport: str) -> None:
    if transport == "nccl":
        use_doubles()
    with Ranks(3, lose_the_store, transport=transport, store_rank=0) as ranks:
        answers = ranks.answers()
    assert sorted(answers) == [1, 2]
    for answer in answers.values():
        assert isinstance(answer.error, PeerFailure) and answer.error.rank == 0, answer


def test_loopback_ends_where_a_rank_cannot_close(monkeypatch: pytest.MonkeyPatch) -> None:
    def close(transport: LoopbackTransport) -> None:
        raise OSError("no")

    monkeypatch.setattr(LoopbackTransport, "close", close)
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(str(args.exc_value)))
    assert LoopbackWorld(2).run(lambda wire: wire.rank) == [0, 1]
    assert raised == ["no", "no"]
