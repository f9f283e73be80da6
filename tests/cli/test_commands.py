"""The other commands, as users call them: what they print, and their exit statuses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpudist.cli import bench, check, main, progress
from gpudist.cli.self_check import Report, Result
from gpudist.errors import TransportError
from gpudist.planning import BUILT_IN
from tests import warm
from tests.cli.test_env import Terminal, run

GOOD = Result("gather", True, 1e-16, 10.0, 5.0, 0.5)
WRONG = Result("scatter", False, float("inf"), 10.0, 5.0, 0.05)
HALO = ["draw", "--shape", "64", "48", "--grid", "2", "2", "--kernel", "3", "--padding", "1"]


def found(*results: Result, transport: str = "host") -> Any:
    report = Report(4, transport, "cpu", 10.0, results)
    return lambda fn, ranks, *arguments, **options: [report] * ranks


def test_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "run_distributed", found(GOOD, transport="loopback"))
    assert main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ranks       4",
        "transport   loopback, on cpu",
        "plain copy  10.00 GB/s a rank, all ranks at once",
        "",
        "operator  exact  dot test  time us  GB/s  of a copy",
        "gather      yes     1e-16       10  5.00        50%",
        "",
        "verdict: All 1 operators are right on 4 ranks over loopback; the "
        "slowest, gather, reaches 50% of a plain copy's speed, and less than 10% would be slow.",
        "note: these ranks were threads of one process that take turns. To check the transport "
        "that training would use:",
        "  torchrun --standalone --nproc-per-node 4 -m gpudist check",
    ]


def test_check_finds_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "run_distributed", found(GOOD, WRONG))
    assert main(["check"]) == 1
    printed = capsys.readouterr().out
    assert "scatter      NO       inf       10  5.00    5% slow" in printed
    assert "Do not use this installation" in printed
    assert main(["check", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["passed"], printed["results"][1]["passed"]) == (False, False)
    assert printed["results"][1]["adjoint_error"] is None
    assert printed["results"][0]["name"] == "gather" and printed["verdict"].startswith("Do not")


def test_check_where_ranks_cannot_talk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3000"

    def fails(*arguments: Any, **options: Any) -> None:
        raise TransportError(problem)

    monkeypatch.setattr(check, "run_distributed", fails)
    assert main(["check"]) == 1
    words = f"Ranks could not exchange data: {problem}"
    verdict, remedy = capsys.readouterr().out.splitlines()
    assert verdict == f"verdict: {words}"
    assert remedy.startswith("remedy: Two ranks of a node have one GPU: start no more processes")
    assert main(["check", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["passed"], printed["verdict"]) == (False, words)
    assert len(printed["remedies"]) == 1


def test_check_under_a_launcher() -> None:
    ended = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "gpudist", "check", "--mib", "1", "--json"),
        python=warm.python(),
    )
    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout)
    assert (printed["ranks"], printed["passed"]) == (2, True)


def test_draw(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.svg"
    assert main([*HALO, "--output", str(picture)]) == 0
    assert picture.read_text().startswith("<?xml")
    # Each rank sends 24 cells along one axis, 32 along the other, and one corner.
    assert capsys.readouterr().out.splitlines()[1:] == [
        "ranks    4",
        f"stage 1  12 messages, {4 * (24 + 32 + 1) * 4} bytes",
    ]


def test_draw_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "a.png"
    shape = ["draw", "--shape", "4", "6", "--grid", "2", "1", "--to", "1", "2"]
    assert main([*shape, "-o", str(picture), "--itemsize", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "picture": str(picture),
        "ranks": [0, 1],
        "shown_rank": 1,
        "stages": [{"messages": 2, "bytes": 96, "matrix": [[0, 1, 48], [1, 0, 48]]}],
    }


def test_one_number_for_every_dim_that_is_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    images = ["draw", "--shape", "2", "3", "8", "8", "--grid", "1", "1", "2", "2", "--halo", "1"]
    assert main([*images, "-o", str(tmp_path / "a.svg"), "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert stage["bytes"] == 4 * (4 + 4 + 1) * 2 * 3 * 4


def test_bench(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    commands: list[list[str]] = []

    def call(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        if "--json" in command:
            Path(command[-1]).write_text('{"environment":{}}\n')
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(bench.subprocess, "run", call)
    pytest.importorskip("rich")
    assert main(["bench", "halo", "--ranks", "2", "--iterations", "20"]) == 1
    assert main(["bench", "all", "--json"]) == 1
    halo = ["-m", "benchmarks", "--subject", "halo", "--ranks", "2", "--iterations", "20"]
    assert commands[0] == halo
    assert commands[1][:4] == ["-m", "benchmarks", "--all", "--json"]
    assert json.loads(capfd.readouterr().out) == [{"environment": {}}]


def test_bench_without_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CHECKOUT", tmp_path)
    assert main(["bench", "halo"]) == 2
    assert "not in the installed package: clone it" in capsys.readouterr().err


def test_bench_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(["bench", "halo"]) == 2
    words = "the benchmarks need rich, which is not installed: pip"
    assert f"gpudist bench: error: {words}" in capsys.readouterr().err


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    shown = progress.Progress()
    shown("gather", 1, 3)
    shown("done", 3, 3)
    bar = "#" * 10 + "." * 20
    assert terminal.getvalue() == f"\r[{bar}] 1/3 gather\x1b[K\r\x1b[K"
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    progress.Progress()("gather", 1, 3)
    assert file.getvalue() == ""


def test_an_error_erases_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    plan = ["plan", "torch.nn:ReLU", "--shape", "2", "--ranks", "3"]
    assert main(plan) == 2
    assert "gpudist: loading torch" not in terminal.getvalue()
    shown, error = terminal.getvalue().split("gpudist plan: error: ")
    assert "dims that can be cut" in shown and shown.endswith("\r\x1b[K")
    assert "3 is not a product" in error


def test_loading_is_told_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(check, "run", lambda arguments: print("checked", file=terminal) or 0)
    assert main(["check"]) == 0
    assert terminal.getvalue() == "gpudist: loading torch\r\x1b[Kchecked\n"


# Starts each in a process of its own, since this one has torch: at most 0.12 s of CPU, where torch
# takes 5. The limit leaves room for a machine that is shared.
START = """
import resource, runpy, sys
try:
    runpy.run_module("gpudist", run_name="__main__")
finally:
    loaded = sorted({"torch", "numpy"} & sys.modules.keys())
    used = resource.getrusage(resource.RUSAGE_SELF)
    print("loaded", loaded, "in time", used.ru_utime + used.ru_stime < 0.5)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--version"], 0, "gpudist 0."),
        (["--help"], 0, "describes a command"),
        (["plan", "--help"], 0, f"{', '.join(BUILT_IN)}, or a file"),
        (["plan"], 2, "gpudist plan: error: the following arguments are required"),
        (["bench", "nothing"], 2, "gpudist bench: error: no subject 'nothing'"),
    ],
)
def test_help_and_wrong_usage_load_no_torch(arguments: list[str], status: int, words: str) -> None:
    ended = run("-c", START, *arguments)
    assert ended.returncode == status
    assert words in " ".join((ended.stdout + ended.stderr).split())
    assert ended.stdout.endswith("loaded [] in time True\n"), ended.stdout
