"""``run_distributed`` on threads and on processes: results by rank, or the root cause."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from gpudist import errors
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition


def identify(P_world: Partition) -> tuple[int | None, int, int]:
    return P_world.rank, P_world.size, os.getpid()


def add(P_world: Partition, number: int, *, factor: int) -> int:
    return P_world.allreduce_data([number])[0] * factor


def fail_on(P_world: Partition, rank: int) -> None:
    if P_world.rank == rank:
        raise AssertionError(f"{P_world.rank} is not 7")
    P_world.barrier()


def hang_here(P_world: Partition, duration_s: float) -> None:
    time.sleep(duration_s)


def miss_barrier(P_world: Partition) -> None:
    if P_world.rank != 1:
        P_world.barrier()


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_run_distributed_returns_by_rank(transport: Any) -> None:
    answers = run_distributed(identify, 2, transport=transport)
    assert [answer[:2] for answer in answers] == [(0, 2), (1, 2)]
    assert (answers[0][2] == os.getpid()) == (transport == "loopback")


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_run_distributed_passes_arguments(transport: Any) -> None:
    assert run_distributed(add, 3, 2, transport=transport, factor=10) == [60, 60, 60]


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_run_distributed_raises_the_root_cause(transport: Any) -> None:
    with pytest.raises(AssertionError, match="1 is not 7"):
        run_distributed(fail_on, 2, transport=transport, rank=1)


@pytest.mark.parametrize(("transport", "timeout"), [("loopback", 0.5), ("gloo", 4.0)])
def test_run_distributed_reports_a_hang(
    transport: Any, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpudist.testing.GRACE_S", 0.5)
    with pytest.raises(errors.CollectiveTimeout, match="in hang_here"):
        run_distributed(hang_here, 2, 6 * timeout, transport=transport, timeout=timeout)


def test_run_distributed_names_the_transports() -> None:
    with pytest.raises(ValueError, match="use 'loopback', 'gloo' or 'host'"):
        run_distributed(identify, 2, transport="carrier pigeon")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("transport", ["loopback", "gloo"])
def test_run_distributed_ends_a_wait_at_its_deadline(transport: Any) -> None:
    with pytest.raises(errors.CollectiveTimeout):
        run_distributed(miss_barrier, 2, transport=transport, timeout=0.5)
