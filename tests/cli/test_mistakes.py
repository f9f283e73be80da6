"""A user's mistake gives one line and an exit status, never a traceback.

So do interrupts and pipes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import gpudist
from benchmarks import SUBJECTS
from gpudist.cli import main, plan
from tests import warm
from tests.cli.test_env import ROOT

SMALL = ["--shape", "1", "1", "8", "8", "--ranks", "2"]
NETWORK = "tests.planning.test_advice:two_convolutions"
PLAN = ["plan", NETWORK]
HALO = ["draw", "--shape", "64", "48", "--grid", "2", "2", "--kernel", "3", "--padding", "1"]


def status_of(arguments: list[str]) -> int:
    """Return the exit status, also if argparse refuses the arguments."""
    try:
        return main(arguments)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: gpudist") and "bench" in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out == f"gpudist {gpudist.__version__}\n"


def test_help_of_benchmarks_lists_their_subjects(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["bench", "--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"Subjects: {', '.join(SUBJECTS)}." in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([*PLAN, "--shape", "1", "1", "8", "8", "--ranks", "-2"], "not -2 ranks"),
        ([*PLAN, "--shape", "1", "1", "8", "8", "--ranks", "two"], "invalid int value: 'two'"),
        ([*PLAN, "--shape", "1", "1", "8", "-8", "--ranks", "2"], "has no cells"),
        ([*PLAN, "--shape", "1", "1", "8", "1" + "0" * 20, "--ranks", "2"], "cannot be called"),
        ([*PLAN, "--shape", "8", "--ranks", "2"], "cannot be called with an input of shape [8]"),
        ([*PLAN, "--shape", "1,1,8,8", "--ranks", "2"], "separate numbers by spaces"),
        (
            [*PLAN, "--shape", "1", "3", "8", "8", "--ranks", "2"],
            "layer '0', a Conv2d, expects 1 channels in dim 1, and got an input of shape [1, 3, 8,",
        ),
        (
            [*PLAN, "--shape", "8", "8", "--ranks", "2"],
            "layer '0', a Conv2d, expects 4 dims: batch, 1 channels, 2 of space, and got",
        ),
        (
            [*PLAN, "--shape", "1", "1", "8", "8", "--ranks", "11"],
            "11 is not a product of one factor per dim that can be cut",
        ),
        ([*PLAN, *SMALL, "--best", "0"], "the best 0 partitions"),
        ([*PLAN, *SMALL, "--profile", "v100"], "neither built in"),
        ([*PLAN, *SMALL, "--profile", str(ROOT)], "neither built in"),
        ([*PLAN, *SMALL, "--optimizer", "nadam"], "invalid choice: 'nadam'"),
        ([*PLAN, *SMALL, "--memory", "0"], "--memory 0: give a positive number of GiB"),
        ([*PLAN, "--shape", "1", "1", "8x8"], "--shape 1 1 8x8: separate numbers"),
        ([*PLAN, *SMALL, "--grid", "1", "1", "2", "1"], "--grid belongs to --plan or --search"),
        ([*PLAN, *SMALL, "--search", "--plan", "a.json"], "not allowed with argument"),
        ([*PLAN, *SMALL, "--search", "-o", "a.svg"], "a.svg: --search writes a plan, not a pict"),
        ([*PLAN, *SMALL, "--search", "--every-rank"], "--every-rank do not belong to --search"),
        ([*PLAN, *SMALL, "--search", "--grid", "1", "1", "4", "1"], "--grid has 4 workers, but"),
        ([*PLAN, *SMALL, "--search", "--grid", "1", "2", "1"], "does not split an input of 4 dims"),
        ([*PLAN, *SMALL[:5], "--plan", "/nowhere/plan.json"], "/nowhere/plan.json cannot be read"),
        ([*PLAN, *SMALL, "-o", "plan.jpg"], "plan.jpg: the suffix of a picture must be"),
        ([*PLAN, *SMALL, "-o", "/nowhere/plan.png"], "/nowhere/plan.png"),
        (["plan", "nowhere.at_all:make", *SMALL], "No module named 'nowhere'"),
        (["plan", "json:nothing", *SMALL], "has no attribute 'nothing'"),
        (["plan", "json", *SMALL], "MODULE:NAME"),
        (["plan", "", *SMALL], "MODULE:NAME"),
        (["plan", "json:decoder", *SMALL], "called without arguments, it fails"),
        (["plan", "os:getpid", *SMALL], "is int, not a torch module"),
        (["plan", "broken:make", *SMALL], "ZeroDivisionError"),
        (
            ["draw", "--shape", "0", "--grid", "2", "-o", "a.jpg"],
            "a.jpg: the suffix of a picture must be",
        ),
        ([*HALO, "-o", "/nowhere/a.png"], "/nowhere/a.png"),
        ([*HALO, "--stride", "1", "1", "1"], "--stride has 3 numbers, but --kernel has 2"),
        (["draw", "--shape", "8", "--grid", "2", "2"], "one axis per dim"),
        (["draw"], "--shape and --grid are needed, or --plan"),
        (["draw", "--plan", "a.json", "--shape", "2"], "--plan is drawn alone, without --shape"),
        (["draw", "--plan", "/nowhere/a.json"], "/nowhere/a.json cannot be read"),
        (["draw", "--shape", "-8", "--grid", "2"], "--shape -8 has no cells"),
        (["draw", "--shape", "0", "--grid", "2"], "--shape 0 has no cells"),
        (["draw", "--shape", "8,8", "--grid", "2"], "separate numbers by spaces"),
        (["draw", "--shape", "8", "--grid", "2", "--to", "2", "1"], "a partition with 2 axes"),
        (
            ["draw", "--shape", "8", "--grid", "2", "--kernel", "3", "3"],
            "2 windows for",
        ),
        (["draw", "--shape", "8", "--grid", "2", "--dims", "5"], "dims [5] are not among the 1"),
        (["draw", "--shape", "8", "--grid", "2", "--stride", "2"], "belongs to --kernel, which"),
        (["draw", "--shape", "8", "--grid", "2", "--nested"], "belongs to --kernel or --halo"),
        (["draw", "--shape", "8", "--grid", "2", "--kernel", "0"], "error: "),
        (["draw", "--shape", "8", "--grid", "2", "--kernel", "3", "--rank", "7"], "rank 7"),
        (["draw", "--shape", "8", "--grid", "2", "--kernel", "3", "--itemsize", "0"], "itemsize"),
        (["draw", "--shape", "8", "--grid", "1000"], "at most 512"),
        (["check", "--ranks", "-1"], "both must be at least 1"),
        (["check", "--ranks", "0"], "both must be at least 1"),
        (["bench"], "required: subject\n"),
        (["bench", "nothing"], "no subject 'nothing'; choose all, profile, or one of"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_mistakes(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    assert status_of(arguments) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert "Traceback" not in printed.err
    assert f"gpudist{'' if arguments == ['dance'] else f' {arguments[0]}'}: error: " in printed.err
    assert printed.out == ""
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["broken.py"]


number = st.integers(-3, 9).map(str)
numbers = st.lists(number, max_size=4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=numbers,
    grid=numbers,
    options=st.lists(
        st.tuples(
            st.sampled_from(
                ["--kernel", "--halo", "--to", "--stride", "--dilation", "--padding", "--dims"]
            ),
            numbers,
        ),
        max_size=3,
    ),
    flags=st.lists(st.sampled_from(["--periodic", "--nested", "--json"]), max_size=2),
)
def test_any_numbers_to_draw(
    shape: list[str],
    grid: list[str],
    options: list[tuple[str, list[str]]],
    flags: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path_factory.getbasetemp() / "any.svg"
    words = [word for name, given in options for word in (name, *given)]
    command = ["draw", "--shape", *shape, "--grid", *grid, *words, *flags, "-o", str(picture)]
    assert status_of(command) in (0, 2)


@pytest.mark.filterwarnings("always")
def test_a_warning_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--shape", "1", "8", "8", "--ranks", "4"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines and len(set(lines)) == len(lines)
    assert all(line.startswith("gpudist plan: warning: ") for line in lines)


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "plan", interrupted)
    assert main([*PLAN, *SMALL]) == 130
    assert capsys.readouterr().err == "gpudist plan: interrupted\n"


def ended(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [warm.python(), *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True, stderr=subprocess.PIPE, timeout=90, **options,
    )  # fmt: skip


def test_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    found = ended("-m", "gpudist", "env", "--json", stdout=writer)
    os.close(writer)
    assert (found.returncode, found.stderr) == (141, "")


def test_a_signal_in_the_middle() -> None:
    many = [*PLAN, "--shape", "1", "1", "512", "512", "--ranks", "256", "--every-rank"]
    program = (
        "import signal, sys\n"
        # Whoever starts programs in the background may have it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        # An import of torch that a signal interrupts may fail in other ways.
        "from gpudist.cli import main, plan\n"
        "signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))\n"
        "signal.setitimer(signal.ITIMER_REAL, 1.5)\n"
        f"sys.exit(main({many!r}))\n"
    )
    found = ended("-c", program, stdout=subprocess.PIPE)
    assert (found.returncode, found.stdout) == (130, "")
    assert found.stderr == "gpudist plan: interrupted\n"
