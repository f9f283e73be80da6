"""Every subject and command runs at its smallest size; its results are right, changed ones not."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import SUBJECTS, network_memory, plan, plans
from benchmarks.beside import work
from benchmarks.beside.adapters import alone, ours, torch_distributed
from benchmarks.case import KIB, Case, Side
from benchmarks.correctness.__main__ import rows_of, runs
from benchmarks.correctness.libraries import LIBRARIES
from benchmarks.document import document
from benchmarks.environment import ROOT
from benchmarks.files import read
from benchmarks.memory import __main__ as memory
from benchmarks.training import Step
from gpudist.planning import profile_of
from gpudist.testing import run_distributed
from gpudist.transport.host.core_transport import is_built, what_is_missing
from gpudist.world.partition import Partition
from tests import warm

pytestmark = pytest.mark.skipif(not is_built(), reason="" if is_built() else what_is_missing())
WORLD_S = 200.0
# Small shapes for the subjects whose shapes are not multiples of one block.
SMALL = {
    "U-Net 64^3": (1, 1, 16, 16, 16),
    "U-Net 96^3": (1, 1, 16, 16, 16),
    "ResNet-18 256^2": (2, 3, 64, 64),
    "multi-head layer": (8, 2, 16),
    work.UNET: (1, 1, 16, 8, 8),
    work.BLOCK: (2, 4, 16),
    work.HALO: (1, 2, 6, 3, 3),
}
CORRECT = ("conv 3, stride 2, padding 1", "bilinear aligned, twice")


def smallest(subject: str, ranks: int) -> Iterator[Case]:
    """Yield the cases of a subject, with small shapes, or small blocks."""
    module = work if subject == "beside" else importlib.import_module(f"benchmarks.{subject}")
    for case in module.cases(ranks):
        given = case.parameters
        if "shape" in given:
            name = next((given[key] for key in ("network", "what", "work") if key in given), "")
            yield replace(case, parameters=given | small(subject, name, given))
        elif subject == "repartition":
            yield replace(case, parameters={"n": 64})
        elif case.bytes <= 16 * KIB:
            yield case


def small(subject: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    dims, channels = len(given["shape"]), given["shape"][1]
    shape = (2, channels, 24, 16, 4)[:dims] if dims > 2 else (8, channels)
    if subject == "attention":
        shape = (1, 2, 8, 4)
    found: dict[str, Any] = {"shape": SMALL.get(name, shape)}
    return found | ({"heads": 2} if "heads" in given else {})


def require_checked(sides: Mapping[str, Side], P_world: Partition, where: str) -> None:
    """Each side is right, and one with another result is wrong."""
    for name, side in sides.items():
        side.clear()
        P_world.barrier()
        result = side.call()
        assert side.is_right(result), f"{where}: {name}"
        changed = spoilt(result)
        assert changed is None or not side.is_right(changed), f"{where}: {name}, changed"


def spoilt(result: Any) -> Any:
    """Return the result with other numbers; ``None`` if it has none on this rank."""
    if isinstance(result, (torch.Tensor, np.ndarray)):
        return result + 1 if np.asarray(result).size else None
    if isinstance(result, Step):
        return replace(result, loss=2 * result.loss)
    if isinstance(result, dict):
        return {name: x.logical_not() for name, x in result.items()}
    if isinstance(result, tuple) and isinstance(result[0], torch.Tensor):
        return tuple(2 * each + 1 for each in result)
    return None


@torch.no_grad()
def every_subject_is_right(P_world: Partition, subjects: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["RANK"] = str(P_world.rank)
    for subject in subjects:
        cases = list(smallest(subject, P_world.size))
        assert cases, subject
        for case in cases:
            sides = importlib.import_module(f"benchmarks.{subject}").sides(case, P_world)
            assert next(iter(sides)) in ("gpudist", "gloo gpudist")
            require_checked(sides, P_world, f"{subject}, {case.name}")
    if subjects == SUBJECTS:
        for case in smallest("beside", P_world.size):
            sides = {"gpudist": ours.side(case, P_world)}
            if case.parameters["work"] != work.UNET:
                sides |= torch_distributed.sides(case)
            if case.parameters["work"] in (work.UNET, work.BLOCK):
                sides |= alone.sides(case)
            require_checked(sides, P_world, f"beside, {case.name}")


def test_every_subject() -> None:
    """New processes, since peers start process groups of their own."""
    run_distributed(every_subject_is_right, 2, SUBJECTS, transport="host", timeout=WORLD_S)


def test_operators_of_four_ranks() -> None:
    """Grids of two dims, and sums over more than two ranks."""
    subjects = ("halo", "all_sum_reduce", "operators", "repartition")
    run_distributed(every_subject_is_right, 4, subjects, transport="host", timeout=WORLD_S)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    ended = subprocess.run(
        [warm.python(), "-m", "benchmarks", "--subject", "sum_reduce", "--cases", "16 B",
         "--iterations", "20", "--peers", str(tmp_path), "--json", str(path)],
        cwd=ROOT, check=False, timeout=WORLD_S, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (run,) = read(path)
    assert all(row.correct and row.ranks == 2 for row in run.rows)
    assert "gloo" in [row.peer for row in run.rows]
    assert "| 16 B | 16 |" in document([run])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpudist.distribute", "gpudist.nn"])
def test_correctness(name: str) -> None:
    (peer,) = (each for each in LIBRARIES if each.name == name)
    chosen = [(case, layout) for words in CORRECT for case, layout in runs(words)[:2]]
    rows = [*rows_of(peer, chosen, limit_s=60)]
    assert len(rows) >= 4 and {row.kind for row in rows} == {"right"}


def networks_are_measured(P_world: Partition) -> None:
    torch.set_num_threads(1)
    assert network_memory.step(P_world, 16, 4).peak_mib > 0
    (seconds,) = plan.measure(P_world, (1, 1, 8, 8, 8), [(1, 1, 2, 1, 1)], 1)
    assert seconds > 0


def test_memory_and_plan() -> None:
    run_distributed(networks_are_measured, 2, transport="host", timeout=WORLD_S)
    cases = {name: one["total"] for name, one in memory.predicted([])}
    assert sorted(cases, key=lambda name: cases[name]) == [f"H200, {n}^3" for n in (32, 64, 128)]


def test_plans() -> None:
    name = "U-Net 8^3"
    planned = plans.plans_of(plans.NETWORKS[name], 1, 2, profile_of("h100"))
    assert len(planned) >= 5 and sum(one.is_searched for one in planned) == 1
    some = [one for one in planned if one.is_searched or one.kind == "grid"]
    given = [(one.advice.grid, one.text) for one in some]
    times = run_distributed(plans.measure, 2, name, 1, given, 1, transport="host", timeout=WORLD_S)[
        0
    ]
    found = plans.summary(plans.rows_of(name, 1, some, times))
    assert found.regret >= 0 and found.measured > 0
