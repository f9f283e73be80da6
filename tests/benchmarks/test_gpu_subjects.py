"""The cases of the GPU's subjects and the checks of their results, over the doubles."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.case import Side
from benchmarks.gpu import SEVERAL_RANKS, SUBJECTS, itself, torch_messages
from benchmarks.gpu.machine import HostMachine
from benchmarks.gpu.measure import GpuCase, GpuRow, measure
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.benchmarks.test_rows import KEYS
from tests.doubles import use_doubles
from tests.pool import distributed


def cases_of(subject: str, ranks: int) -> list[GpuCase]:
    return importlib.import_module(f"benchmarks.gpu.{subject}").cases(ranks, tiny=True)


def sides_of(case: GpuCase, P_world: Partition) -> dict[str, Side]:
    module = importlib.import_module(f"benchmarks.gpu.{case.subject}")
    return module.sides(case, P_world, HostMachine())


@pytest.fixture(scope="module")
def P_alone() -> Iterator[Partition]:
    use_doubles()
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, 20.0, "benchmarks")
    yield runtime.world_of(wire)
    wire.close()
    itself.end()
    torch_messages.end()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("subject", SUBJECTS)
@torch.no_grad()
def test_all_sides_of_all_cases_are_right(subject: str, P_alone: Partition) -> None:
    for case in cases_of(subject, 1):
        sides = sides_of(case, P_alone)
        assert next(iter(sides)) == "gpudist"
        for name, side in sides.items():
            for _ in range(2):
                side.clear()
                assert side.is_right(side.call()), (case.name, name)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("subject", SUBJECTS)
@torch.no_grad()
def test_what_is_wrong_is_seen(subject: str, P_alone: Partition) -> None:
    """Every check of every case refuses a result in which a cell is another."""
    for case in cases_of(subject, 1):
        for name, side in sides_of(case, P_alone).items():
            if "fake" in name:
                continue
            result = side.call()
            changed = result[0] if isinstance(result, (tuple, list)) else result
            cells = torch.arange(changed.numel()).reshape(changed.shape)
            changed.mul_(cells <= changed.numel() // 2)
            assert not side.is_right(result), (case.name, name)


@torch.no_grad()
def test_rows(P_alone: Partition) -> None:
    (case, *_) = cases_of("copy", 1)
    rows = measure(case, sides_of(case, P_alone), HostMachine(), P_alone, 20)
    (row,) = rows
    assert list(asdict(row)) == [*KEYS, "gbps", "peak_mib", "peer_peak_mib"]
    assert (row.peer, row.correct, row.bytes) == ("copy_", True, 2048)
    assert row.gbps == pytest.approx(row.bytes / row.us_median / 1e3, abs=0.02)
    enqueued = replace(case, clock="enqueue")
    (row,) = measure(enqueued, sides_of(case, P_alone), HostMachine(), P_alone, 20)
    assert isinstance(row, GpuRow) and row.gbps is None


@pytest.mark.one_in(3)
@distributed(ranks=2, transports=["nccl"])
@pytest.mark.parametrize("subject", SEVERAL_RANKS)
@torch.no_grad()
def test_two_ranks(P_world: Partition, subject: str) -> None:
    try:
        for case in cases_of(subject, 2):
            rows = measure(case, sides_of(case, P_world), HostMachine(), P_world, 2)
            assert [row.peer for row in rows if not row.correct] == [], case.name
            assert {row.ranks for row in rows} == {2}
            assert "none" not in {row.peer for row in rows}
    finally:
        torch_messages.end()


def test_torch_has_its_messages_on_one_rank(P_alone: Partition) -> None:
    """Without NCCL only messages of the fake group remain, and their name shows it."""
    assert list(torch_messages.sides(P_alone, [3, 1], lambda rank: rank)) == [
        "batch_isend_irecv, fake"
    ]


@pytest.mark.parametrize("refuses", [False, True])
def test_torch_may_refuse_messages_to_itself(
    P_alone: Partition,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    refuses: bool,
) -> None:
    def batch(operations: object) -> list[object]:
        if refuses:
            raise RuntimeError("no messages to oneself\nand a trace")
        return []

    torch_messages.start(P_alone)
    monkeypatch.setattr(torch_messages, "start", lambda P_world: "nccl")
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)
    found = torch_messages.sides(P_alone, [3, 1], lambda rank: rank)
    assert ("batch_isend_irecv to itself, nccl" in found) == (not refuses)
    said = "to itself, which fails: no messages to oneself\n"
    assert capsys.readouterr().err.endswith(said) == refuses
