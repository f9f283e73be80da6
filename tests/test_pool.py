"""The pool of processes: it reports what goes wrong on a rank, and serves the next test."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpudist import errors, ops
from gpudist.testing.rank_pool import GRACE_S, RankPool, RanksFailed
from gpudist.transport.failure.channel import Failure
from gpudist.world.partition import Partition
from tests import warm
from tests.pool import distributed

SIZE = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(SIZE, timeout_s=20, start_method="forkserver") as pool:
        yield pool


def serve_nobody(*_: object) -> None:
    time.sleep(600)


def exit_at_start(*_: object) -> None:
    os._exit(7)


def raise_at_start(*_: object) -> None:
    raise OSError("no memory")


def die_at_start(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def identify(P_world: Partition) -> tuple[int | None, int, int]:
    return P_world.rank, P_world.size, os.getpid()


def die_on(P_world: Partition, rank: int) -> None:
    if P_world.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    raise errors.PeerFailure(f"rank {rank} does not answer", rank)


def exit_on(P_world: Partition, rank: int) -> None:
    if P_world.rank == rank:
        os._exit(7)


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


def die_before_barrier(P_world: Partition) -> None:
    if P_world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    P_world.barrier()


def fail_before_barrier(P_world: Partition) -> None:
    if P_world.rank == 1:
        raise KeyError("lost")
    P_world.barrier()


def gather_blocks(P_world: Partition, width: int) -> int:
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    return ops.gather(torch.ones(width), P_x, shape="static").numel()


def draw(P_world: Partition) -> float:
    return torch.rand(()).item()


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


FORKS = """
import time
from gpudist.testing.rank_pool import RankPool

said = ["nothing"]

def tell(P_world):
    return said[0], P_world.rank

pool = RankPool(3, start_method="fork")
said[0] = "what only this program knows"
print(pool.run(3, tell, transport="gloo"))
start_s = time.monotonic()
pool.close()
print(time.monotonic() - start_s)
"""


def test_forked_processes_have_what_the_program_has_and_end_when_told() -> None:
    ended = subprocess.run([warm.python(), "-c", FORKS], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    answers, seconds = ended.stdout.splitlines()
    assert answers == str([("what only this program knows", rank) for rank in range(3)])
    assert float(seconds) < GRACE_S


@pytest.mark.parametrize("size", [0, SIZE + 1])
def test_wrong_number_of_ranks(pool: RankPool, size: int) -> None:
    before = assert_serves(pool)
    with pytest.raises(ValueError, match=f"{size} ranks, but the pool has 1 to {SIZE}"):
        pool.run(size, identify)
    assert assert_serves(pool) == before


def test_processes_that_do_not_start_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(2, timeout_s=20, start_method="forkserver") as pool:
        with monkeypatch.context() as patch:
            patch.setattr("gpudist.testing.rank_pool.pool.START_S", 0.3)
            patch.setattr("gpudist.testing.rank_pool.pool.serve", serve_nobody)
            with pytest.raises(RuntimeError, match=r"did not start within 0\.3 s"):
                pool.run(2, identify)
        assert_serves(pool, 2)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("serve", "how"),
    [(exit_at_start, "exit code 7"), (raise_at_start, "exit code 1"), (die_at_start, "SIGKILL")],
)
def test_processes_that_end_while_they_start_are_replaced(
    monkeypatch: pytest.MonkeyPatch, serve: Any, how: str
) -> None:
    with RankPool(3, timeout_s=20, start_method="forkserver") as pool:
        before = assert_serves(pool, 1)
        with monkeypatch.context() as patch:
            patch.setattr("gpudist.testing.rank_pool.pool.serve", serve)
            with pytest.raises(RuntimeError, match=f"process 1 ended while it started: {how};"):
                pool.run(3, identify)
        assert set(assert_serves(pool, 3)).isdisjoint(before)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("body", "how"), [(die_on, "died: SIGKILL"), (exit_on, "died: exit code 7")]
)
def test_death_names_the_rank(pool: RankPool, body: Any, how: str) -> None:
    before = assert_serves(pool)
    with pytest.raises(RanksFailed, match=f"rank 1 {how}") as caught:
        pool.run(SIZE, body, kwargs={"rank": 1})
    assert caught.value.root.rank == 1
    assert set(assert_serves(pool)).isdisjoint(before)


def test_death_shows_what_survivors_raised(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="ranks 0, 2 raised") as caught:
        pool.run(SIZE, die_on, kwargs={"rank": 1})
    assert str(caught.value).count("PeerFailure: rank 1 does not answer") == 1
    assert_serves(pool)


def test_death_between_runs(pool: RankPool) -> None:
    victim = assert_serves(pool)[1]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RanksFailed, match="rank 1 died: SIGKILL"):
        pool.run(SIZE, identify, limit_s=2)
    assert_serves(pool)


def test_idle_processes_survive_a_failure(pool: RankPool) -> None:
    before = assert_serves(pool)
    with pytest.raises(RanksFailed):
        pool.run(2, fail_on, kwargs={"rank": 0})
    assert assert_serves(pool)[0] == before[2]


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


def test_death_in_a_collective_ends_the_survivors(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 died: SIGKILL") as caught:
        pool.run(SIZE, die_before_barrier)
    for outcome in caught.value.outcomes[1:]:
        assert isinstance(outcome.error, errors.PeerFailure)
        assert outcome.error.rank == 1
    assert_serves(pool)


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


def test_shapes_are_agreed_anew_in_a_run(pool: RankPool) -> None:
    assert pool.run(2, gather_blocks, kwargs={"width": 2}) == [4, 0]
    assert pool.run(2, gather_blocks, kwargs={"width": 3}) == [6, 0]


def test_draws_do_not_depend_on_earlier_runs(pool: RankPool) -> None:
    draws = pool.run(SIZE, draw)
    assert draws == [draws[0]] * SIZE
    assert pool.run(SIZE, draw) == draws


def test_body_must_be_at_top_level() -> None:
    with pytest.raises(TypeError, match="top level"):

        @distributed(ranks=2)
        def body(P_world: Partition) -> None: ...


@distributed(ranks=[1, 3])
@pytest.mark.parametrize("word", ["a", "b"])
def test_parametrized_body(P_world: Partition, word: str) -> None:
    assert P_world.size in (1, 3)
    assert word in "ab"


@distributed(ranks=2, transports=["gloo"], timeout_s=20)
def test_gloo_only(P_world: Partition) -> None:
    assert P_world.transport == "gloo"


@distributed(ranks=2)
def skip_on(P_world: Partition, ranks_skipped: list[int]) -> None:
    if P_world.rank in ranks_skipped:
        pytest.skip("not today")


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_skip_on_all_ranks_or_none(transport: str) -> None:
    skip_on(ranks=2, transport=transport, ranks_skipped=[])
    with pytest.raises(pytest.skip.Exception, match="not today"):
        skip_on(ranks=2, transport=transport, ranks_skipped=[0, 1])
    with pytest.raises(pytest.fail.Exception, match=r"skipped on ranks \[1\]"):
        skip_on(ranks=2, transport=transport, ranks_skipped=[1])


@distributed(ranks=2)
def compare_on(P_world: Partition, rank: int) -> None:
    assert P_world.rank != rank, "this rank disagrees"


def test_failing_body_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="this rank disagrees"):
        compare_on(ranks=2, transport="loopback", rank=1)
    with pytest.raises(pytest.fail.Exception, match="on rank 1: this rank disagrees"):
        compare_on(ranks=2, transport="gloo", rank=1)
    compare_on(ranks=2, transport="gloo", rank=5)
