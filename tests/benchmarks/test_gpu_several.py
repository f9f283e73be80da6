"""Benchmarks between GPUs, run with the doubles: sides are right, errors are detected."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections import Counter
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch

from benchmarks.case import Side
from benchmarks.gpu import several, torch_messages
from benchmarks.gpu.files import read
from benchmarks.gpu.machine import HostMachine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several.cells import cells, grid_of
from gpudist.geometry.boxes import Box
from gpudist.world.partition import Partition
from tests import warm
from tests.doubles import use_doubles
from tests.pool import distributed

ROOT = Path(__file__).resolve().parents[2]
PEERS = {
    "halo": {"batch_isend_irecv, gloo", "messages alone, gloo"},
    "repartition": {"all_to_all_single, gloo", "batch_isend_irecv, gloo", "DTensor, gloo"},
    "broadcast": {"broadcast, gloo"},
    "sum_reduce": {"reduce, gloo"},
    "all_sum_reduce": {"all_reduce, gloo", "DTensor, gloo"},
    "unet": {"1 rank"},
    "scaling": {"1 rank", "1 block alone"},
}


def cases_of(subject: str, ranks: int) -> list[GpuCase]:
    return importlib.import_module(f"benchmarks.gpu.several.{subject}").cases(ranks, tiny=True)


def sides_of(case: GpuCase, P_world: Partition) -> dict[str, Side]:
    module = importlib.import_module(f"benchmarks.gpu.several.{case.subject}")
    return module.sides(case, P_world, HostMachine())


@distributed(ranks=[2, 4], transports=["nccl"], timeout_s=240.0)
@pytest.mark.parametrize("subject", several.SUBJECTS)
@torch.no_grad()
def test_all_sides_are_right(P_world: Partition, subject: str) -> None:
    """Results of two calls are right, and a changed cell is detected."""
    try:
        for case in cases_of(subject, P_world.size):
            sides = sides_of(case, P_world)
            assert next(iter(sides)) == "gpudist" and {*sides} - {"gpudist"} <= PEERS[subject]
            for name, side in sides.items():
                result = None
                for _ in range(2):
                    side.clear()
                    result = side.call()
                    assert side.is_right(result), (case.name, name)
                if _spoilt(result, case, name, P_world.rank or 0):
                    assert not side.is_right(result), (case.name, name)
    finally:
        torch_messages.end()


def _spoilt(result: object, case: GpuCase, name: str, rank: int) -> bool:
    """Change the last cells of a result; return whether any of them are compared."""
    if isinstance(result, (list, tuple)):
        result = result[0] if result else None
    if not isinstance(result, torch.Tensor) or result.numel() == 0:
        return False
    if case.subject == "sum_reduce" and rank != 0:
        return False  # what torch leaves there is nobody's
    result.view(-1)[result.numel() // 2 :].add_(1)
    return True


def test_the_whole_run_over_the_doubles(tmp_path: Path) -> None:
    """Run as torchrun starts it: one file, and every row of it right."""
    use_doubles()
    path = tmp_path / "rows.jsonl"
    ended = subprocess.run(
        [warm.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "benchmarks.gpu", "--subject", "broadcast", "--iterations", "20",
         "--json", str(path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    machine, rows = read(path)
    assert machine["gpu"] == "none: a rehearsal over test doubles"
    assert machine["ranks"] == "2, 2 a node"
    assert Counter(row["peer"] for row in rows) == {"broadcast, gloo": 2}
    for row in rows:
        assert row["correct"] and row["busbw_gbps"] == row["algbw_gbps"]


@pytest.mark.parametrize(
    ("ranks", "dims", "grid"),
    [
        (2, 4, (1, 1, 2, 1)),
        (8, 4, (1, 1, 4, 2)),
        (8, 5, (1, 1, 2, 2, 2)),
        (12, 5, (1, 1, 3, 2, 2)),
        (7, 4, (1, 1, 7, 1)),
    ],
)
def test_grids(ranks: int, dims: int, grid: tuple[int, ...]) -> None:
    assert grid_of(ranks, dims) == grid and prod(grid) == ranks


def test_cells_are_known_by_their_place() -> None:
    """A box of a tensor has the cells of the whole, and zeros beyond its edges."""
    shape = (1, 2, 5, 4)
    whole = cells(shape, Box.whole(shape), torch.device("cpu"), 3)
    numbers = torch.arange(prod(shape)).view(shape)
    assert len(set(whole.flatten().tolist())) == 13
    assert torch.equal(whole[..., 1:] - whole[..., :-1] > 0, numbers[..., 1:] % 13 != 10)
    part = cells(shape, Box((0, 1, 3, 0), (1, 2, 5, 2)), torch.device("cpu"), 3, width=1)
    padded = torch.nn.functional.pad(whole, (1, 1, 1, 1))
    assert torch.equal(part, padded[:, 1:2, 3:7, 0:4])
    assert {len(case.parameters["grid"]) for case in cases_of("halo", 4)} == {4, 5}


def test_every_subject_has_cases_of_every_number_of_ranks() -> None:
    for subject, ranks in product(several.SUBJECTS, (2, 3, 8)):
        module = importlib.import_module(f"benchmarks.gpu.several.{subject}")
        for case in module.cases(ranks):
            assert case.subject == subject and case.ranks == ranks
