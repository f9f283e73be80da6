"""Every subject of a GPU runs over the doubles: results are right, and changed ones are not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.case import Side
from benchmarks.files import write
from benchmarks.gpu import (
    SEVERAL_RANKS,
    SUBJECTS,
    __main__ as command,
    files,
    itself,
    several,
    torch_messages,
)
from benchmarks.gpu.machine import HostMachine
from benchmarks.gpu.measure import GpuCase
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles import use_doubles
from tests.pool import distributed


@pytest.fixture(scope="module")
def P_alone() -> Iterator[Partition]:
    use_doubles()
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, 20.0, "benchmarks")
    yield runtime.world_of(wire)
    wire.close()
    itself.end()
    torch_messages.end()


def cases_of(subject: str, P_world: Partition) -> Iterator[tuple[GpuCase, dict[str, Side]]]:
    room = "benchmarks.gpu.several" if subject in several.SUBJECTS else "benchmarks.gpu"
    module = importlib.import_module(f"{room}.{subject}")
    for case in module.cases(P_world.size, tiny=True):
        sides = module.sides(case, P_world, HostMachine())
        assert next(iter(sides)) == "gpudist"
        yield case, sides


def require_checked(case: GpuCase, sides: dict[str, Side], P_world: Partition) -> None:
    """Two calls of each side are right; a result in which cells are others is wrong."""
    for name, side in sides.items():
        result: Any = None
        for _ in range(2):
            side.clear()
            result = side.call()
            assert side.is_right(result), (case.name, name)
        # What torch's reduce leaves on other ranks is nobody's; the fake group moves nothing.
        if "fake" in name or (case.subject == "sum_reduce" and P_world.rank):
            continue
        changed = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(changed, torch.Tensor) and changed.numel():
            changed.view(-1)[changed.numel() // 2 :].add_(1)
            assert not side.is_right(result), (case.name, name, "changed")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("subject", SUBJECTS)
@torch.no_grad()
def test_one_rank(subject: str, P_alone: Partition) -> None:
    for case, sides in cases_of(subject, P_alone):
        require_checked(case, sides, P_alone)


@pytest.mark.one_in(2)
@distributed(ranks=[2, 4], transports=["nccl"], timeout_s=240.0)
@pytest.mark.parametrize("subject", [*several.SUBJECTS, *SEVERAL_RANKS])
@torch.no_grad()
def test_several_ranks(P_world: Partition, subject: str) -> None:
    try:
        for case, sides in cases_of(subject, P_world):
            require_checked(case, sides, P_world)
    finally:
        torch_messages.end()


def test_the_smallest_case_of_each_clock_is_measured(P_alone: Partition, tmp_path: Path) -> None:
    rows = command.run("self_halo", P_alone, 20, smallest=True)
    assert len({row.case for row in rows}) == 1 and all(row.correct for row in rows)
    write(rows, files.machine("a commit"), tmp_path / "rows.jsonl")
    machine, found = files.read(tmp_path / "rows.jsonl")
    assert machine["commit"] == "a commit" and [row["case"] for row in found] == [
        row.case for row in rows
    ]


@pytest.mark.parametrize("subject", [*SUBJECTS, *several.SUBJECTS])
def test_names_of_cases_tell_them_apart(subject: str) -> None:
    room, ranks = ("gpu.several", 8) if subject in several.SUBJECTS else ("gpu", 1)
    cases = importlib.import_module(f"benchmarks.{room}.{subject}").cases(ranks)
    assert len({case.name for case in cases}) == len(cases)
