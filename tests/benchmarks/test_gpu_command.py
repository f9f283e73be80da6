"""The command for GPUs refuses to run without one; with the doubles it writes its rows."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpudist
from benchmarks.case import Case
from benchmarks.files import write
from benchmarks.gpu import __main__ as command, files
from benchmarks.gpu.machine import HostMachine
from benchmarks.measure import Series, rows_of
from gpudist.world import runtime
from tests import warm
from tests.doubles import use_doubles

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.one_in(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [[], ["--subject", "copy"]], ids=["all", "copy"])
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    # Other tests may have named the doubles.
    own = {name: value for name, value in os.environ.items() if not name.startswith("GPUDIST_")}
    ended = subprocess.run(
        [warm.python(), "-m", "benchmarks.gpu", "--json", str(path), *arguments],
        cwd=ROOT, check=False, timeout=120, capture_output=True, text=True, env=own,
    )  # fmt: skip
    assert ended.returncode == command.NO_GPU
    assert f"nothing is measured: torch {torch.__version__} does not see a GPU" in ended.stderr
    assert not path.exists()


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    # A rehearsal sets it, which is undone at the end of the test.
    monkeypatch.setenv("GPUDIST_TRANSPORT", "nccl")
    return command.main()


def test_a_subject_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_doubles()
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, 20.0, "command")
    module = importlib.import_module("benchmarks.gpu.adjoint")
    monkeypatch.setattr(module, "cases", functools.partial(module.cases, tiny=True))
    monkeypatch.setattr(command, "what_is_missing", lambda ranks, subject: "")
    monkeypatch.setattr(command, "CudaMachine", lambda hold_us: HostMachine())
    monkeypatch.setattr(gpudist, "init", lambda timeout: runtime.world_of(wire))
    given = "--subject", "adjoint", "--iterations", "20", "--results", str(tmp_path)
    try:
        assert called(monkeypatch, *given, "--commit", "abc") == 0
    finally:
        wire.close()
    machine, rows = files.read(tmp_path / "gpu-adjoint.jsonl")
    assert machine["commit"] == "abc"
    assert [row["peer"] for row in rows] == ["forward", "torch pad backward"] * 2
    assert all(row["correct"] for row in rows)
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) and last == f"{len(rows)} rows are right"


def test_a_case_that_fails_is_not_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other cases are measured, and the error is among the output and the failures."""
    module = importlib.import_module("benchmarks.gpu.copy")
    sides = module.sides

    def fail_once(case: Case, *rest: Any) -> Any:
        if case.parameters["bytes"] == module.TINY["1 KiB"]:
            raise RuntimeError("no memory")
        return sides(case, *rest)

    use_doubles()
    monkeypatch.setattr(module, "sides", fail_once)
    wire = runtime.connect("nccl", dist.HashStore(), 0, 1, 20.0, "command")
    failures: list[str] = []
    try:
        rows = command.run("copy", runtime.world_of(wire), 20, failures)
        monkeypatch.undo()
        use_doubles()
        smallest = command.run("copy", runtime.world_of(wire), 20, smallest=True)
    finally:
        wire.close()
    assert [row.case for row in rows] == [row.case for row in smallest] == ["4 KiB"]
    assert failures == ["copy, 1 KiB: RuntimeError: no memory"]
    assert "error: copy, 1 KiB" in capsys.readouterr().out


def test_subjects_apart_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One subject fails, one is wrong and one times out; the others are reported."""
    monkeypatch.setattr(command, "what_is_missing", lambda ranks, subject: "")
    statuses = {"copy": 0, "packing": command.WRONG, "latency": -11}

    def run(arguments: list[str], timeout: float, **_: object) -> SimpleNamespace:
        subject = arguments[arguments.index("--subject") + 1]
        if subject == "enqueue":
            raise subprocess.TimeoutExpired(arguments, timeout)
        if statuses.get(subject, 0) >= 0:
            row = files_row(subject)
            write([row], {"gpu": "none"}, Path(arguments[arguments.index("--json") + 1]))
        return SimpleNamespace(returncode=statuses.get(subject, 0))

    monkeypatch.setattr(command.subprocess, "run", run)
    path = tmp_path / "rows.jsonl"
    assert called(monkeypatch, "--json", str(path)) == command.FAILED
    machine, rows = files.read(path)
    found = [row["subject"] for row in rows]
    assert found == [s for s in command.SUBJECTS if s not in ("latency", "enqueue")]
    assert machine == {"gpu": "none"}
    said = capsys.readouterr().err
    assert "latency ended with status -11" in said and "enqueue was not done after" in said


def files_row(subject: str) -> command.GpuRow:
    (row,) = rows_of(Case(subject, "case", 1, 8, {}), [Series("gpudist", [1.0, 1.0])])
    return command.GpuRow(**asdict(row), gbps=None)


@pytest.mark.parametrize(
    ("ranks", "subject", "gpus", "reason"),
    [
        (1, "copy", 1, ""),
        (1, "halo", 1, "halo takes several ranks"),
        (2, None, 2, ""),
        (3, "halo", 4, ""),
        (2, "copy", 2, "copy is one rank's work; on 2 ranks there are halo, repartition"),
        (3, "enqueue", 4, "must be even, but is 3"),
        (2, "enqueue", 2, ""),
        (2, "enqueue", 1, "2 ranks share 1 GPUs, which needs NCCL 2.30; NCCL is 2.28.9"),
    ],
)
def test_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, ranks: int, subject: str | None, gpus: int, reason: str
) -> None:
    monkeypatch.delenv("GPUDIST_DEVICE_LIBRARY", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(command, "build_info", lambda: SimpleNamespace(nccl_missing=""))
    nccl = SimpleNamespace(version="2.28.9")
    monkeypatch.setattr(command, "describe", lambda: SimpleNamespace(nccl=nccl))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    found = command.what_is_missing(ranks, subject)
    assert reason in found and bool(reason) == bool(found)
