"""The file of experiments: a line of JSON for each, and one about the run."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

from tests.faults.chaos.experiment import DEADLINE_S, Experiment
from tests.faults.chaos.judge import Verdict

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "reliability"
CHAOS = FOLDER / "chaos.jsonl"


@dataclass(frozen=True)
class Tried:
    """Stored fields of an experiment.

    Attributes:
        after_s: the survivors' seconds from the fault to the error.
        attempts: number of attempts, of which the last gave this verdict.
    """

    operator: str
    transport: str
    fault: str
    point: str
    how: str
    after_s: tuple[float, ...]
    attempts: int = 1


@dataclass(frozen=True)
class Run:
    """Time and place of a run, and its seed."""

    date: str
    seed: int
    deadline_s: float
    cores: int
    machine: str
    torch: str


def this_run(seed: int) -> Run:
    return Run(
        datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        seed,
        DEADLINE_S,
        os.cpu_count() or 1,
        platform.machine(),
        torch.__version__,
    )


def row(tried: Experiment, verdict: Verdict) -> Tried:
    after_s = tuple(round(each, 3) for each in verdict.after_s)
    return Tried(
        tried.operator,
        tried.transport,
        tried.fault,
        tried.point,
        verdict.how,
        after_s,
        verdict.attempts,
    )


def write(path: Path, run: Run, rows: Iterable[Tried]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [vars(run), *(vars(row) for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> tuple[Run, list[Tried]]:
    first, *rest = (json.loads(line) for line in path.read_text().splitlines())
    rows = [Tried(**{**line, "after_s": tuple(line["after_s"])}) for line in rest]
    return Run(**first), rows
