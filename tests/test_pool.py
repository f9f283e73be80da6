"""The pool of processes: it reports what goes wrong on a rank, and serves the next test."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpudist import errors
from gpudist.testing.rank_pool import RankPool, RanksFailed
from gpudist.transport.failure.channel import Failure
from gpudist.world.partition import Partition
from tests.pool import distributed

SIZE = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(SIZE, timeout_s=20) as pool:
        yield pool


def identify(P_world: Partition) -> tuple[int | None, int, int]:
    return P_world.rank, P_world.size, os.getpid()


def die_on(P_world: Partition, rank: int) -> None:
    if P_world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    raise errors.PeerFailure(f"rank {rank} does not answer", rank)


def hang_here(P_world: Partition) -> None:
    time.sleep(600)


def hang_except_on(P_world: Partition, rank: int) -> None:
    assert P_world.rank != rank, "this rank gives up"
    hang_here(P_world)


def fail_on(P_world: Partition, rank: int) -> None:
    if P_world.rank == rank:
        raise AssertionError(f"{P_world.rank} is not 7")
    raise errors.PeerFailure(f"rank {rank} raised AssertionError", rank)


def fail_oddly(P_world: Partition) -> None:
    class Unpicklable(Exception):
        pass

    raise Unpicklable("no name to find it by")


def return_lock(P_world: Partition) -> Any:
    return threading.Lock()


def end_world(P_world: Partition) -> None:
    P_world.wire.abort(Failure("PlanMismatch", None, "ended on purpose"))


def fail_before_barrier(P_world: Partition) -> None:
    if P_world.rank == 1:
        raise KeyError("lost")
    P_world.barrier()


def assert_serves(pool: RankPool, size: int = SIZE) -> list[int]:
    """Run a healthy body; return the processes that served it."""
    answers = pool.run(size, identify)
    assert [answer[:2] for answer in answers] == [(rank, size) for rank in range(size)]
    return [answer[2] for answer in answers]


def test_processes_and_worlds_are_reused(pool: RankPool) -> None:
    first = assert_serves(pool)
    assert assert_serves(pool) == first
    assert assert_serves(pool, 2) == first[:2]
    assert assert_serves(pool) == first
    assert os.getpid() not in first


def exit_at_start(*_: object) -> None:
    os._exit(7)


def test_a_process_that_does_not_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(3, timeout_s=20) as pool:
        before = assert_serves(pool, 1)
        with monkeypatch.context() as patch:
            patch.setattr("gpudist.testing.rank_pool.pool.serve", exit_at_start)
            patch.setattr("gpudist.testing.rank_pool.pool.GRACE_S", 0.5)
            with pytest.raises(RanksFailed, match="rank 1 died: exit code 7"):
                pool.run(3, identify)
        assert set(assert_serves(pool, 3)).isdisjoint(before)


def test_death_names_the_rank_and_shows_what_survivors_raised(pool: RankPool) -> None:
    before = assert_serves(pool)
    with pytest.raises(RanksFailed, match="rank 1 died: SIGKILL") as caught:
        pool.run(SIZE, die_on, kwargs={"rank": 1})
    assert caught.value.root.rank == 1
    assert "ranks 0, 2 raised" in str(caught.value)
    assert str(caught.value).count("PeerFailure: rank 1 does not answer") == 1
    assert set(assert_serves(pool)).isdisjoint(before)


def test_hang_shows_every_stack(pool: RankPool) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="had not ended after 2 s") as caught:
        pool.run(SIZE, hang_here, limit_s=2)
    assert time.monotonic() - start < 10
    assert len(caught.value.outcomes) == SIZE
    for outcome in caught.value.outcomes:
        assert "in hang_here" in outcome.text
        assert str(caught.value).count(outcome.text.strip()) == 1
    assert_serves(pool)


def test_failure_ends_ranks_that_do_not_notice(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpudist.testing.rank_pool.pool.GRACE_S", 0.5)
    with pytest.raises(RanksFailed, match="on rank 2: this rank gives up") as caught:
        pool.run(SIZE, hang_except_on, kwargs={"rank": 2})
    assert [outcome.rank for outcome in caught.value.outcomes] == [2, 0, 1]
    for outcome in caught.value.outcomes[1:]:
        assert "had not ended 0.5 s after rank 2 had failed" in outcome.text
        assert "in hang_here" in outcome.text
    assert_serves(pool)


def test_root_cause_comes_first(pool: RankPool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(SIZE, fail_on, kwargs={"rank": 1})
    lines = str(caught.value).splitlines()
    assert lines[0] == "AssertionError on rank 1: 1 is not 7 (3 of 3 ranks failed)"
    assert lines[2] == "rank 1 raised:"
    assert isinstance(caught.value.root.error, AssertionError)


def test_error_in_a_collective_ends_the_others(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="KeyError on rank 1: 'lost'") as caught:
        pool.run(SIZE, fail_before_barrier)
    assert [outcome.rank for outcome in caught.value.outcomes] == [1, 0, 2]
    for outcome in caught.value.outcomes[1:]:
        assert isinstance(outcome.error, errors.PeerFailure)
    assert_serves(pool)


def test_unpicklable_error_keeps_its_text(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="Unpicklable: no name to find it by"):
        pool.run(2, fail_oddly)


def test_unpicklable_result_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="returned a value that cannot be pickled"):
        pool.run(2, return_lock)


def test_ended_world_is_replaced(pool: RankPool) -> None:
    before = assert_serves(pool)
    pool.run(SIZE, end_world)
    assert assert_serves(pool) == before


@distributed(ranks=2)
def compare_on(P_world: Partition, rank: int) -> None:
    assert P_world.rank != rank, "this rank disagrees"


def test_failing_body_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="this rank disagrees"):
        compare_on(ranks=2, transport="loopback", rank=1)
    with pytest.raises(pytest.fail.Exception, match="on rank 1: this rank disagrees"):
        compare_on(ranks=2, transport="host", rank=1)
    compare_on(ranks=2, transport="host", rank=5)
