"""The runner of the first minutes, and its steps as far as a machine without a GPU can run them."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests import warm
from tests.doubles.build import NoCompiler, library
from tests.gpu import REHEARSED
from tests.gpu.first.__main__ import _nccl, main
from tests.gpu.first.runner import ROOT, Place, batches, read, run_all, why_skipped
from tests.gpu.first.steps import Step, first_steps, second_steps
from tests.patience import allowed_s

LIMIT_S = 250.0


def python(
    name: str, code: str, limit_s: float = 60.0, telling: str = "", alone: bool = False,
    quiet_s: float = 60.0,
) -> Step:  # fmt: skip
    command = (sys.executable, "-c", code)
    return Step(name, "", command, limit_s, telling, quiet_s=quiet_s, alone=alone)


def place_in(folder: Path, **more: object) -> Place:
    return Place(folder / "out", folder / "logs", **more)  # pyright: ignore[reportArgumentType]


def test_steps_over_the_doubles(tmp_path: Path) -> None:
    try:
        double = str(library())
    except NoCompiler as error:
        pytest.skip(str(error))
    variables = {"GPUDIST_NCCL_LIBRARY": double, "GPUDIST_DEVICE_LIBRARY": double}
    asked = ["gpu", "environment", "self communicator"]
    options = [part for name in asked for part in ("--only", name)]
    ended = subprocess.run(
        [warm.python(), "-m", "tests.gpu.first", "--out", str(tmp_path), *options],
        cwd=ROOT, env={**os.environ, **variables}, timeout=LIMIT_S, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [(outcome["step"], outcome["status"]) for outcome in summary] == [
        ("gpu", "skipped"), ("environment", "ok"), ("self communicator", "ok")
    ]  # fmt: skip
    assert "a rehearsal over the doubles" in ended.stdout
    # The table is the last of the output, and a file of its own.
    table = (tmp_path / "table.txt").read_text()
    assert ended.stdout.split("\n\n")[-2].strip() == table.strip()
    assert {path.name for path in tmp_path.iterdir()} == {"logs.zip", "summary.json", "table.txt"}
    with zipfile.ZipFile(tmp_path / "logs.zip") as archive:
        assert {"environment.log", "self-communicator.log"} <= {*archive.namelist()}


def test_a_rehearsal_fails_with_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GPUDIST_NCCL_LIBRARY", "GPUDIST_DEVICE_LIBRARY"):
        monkeypatch.setenv(name, str(tmp_path / "absent.so"))
    monkeypatch.setattr(sys, "executable", warm.python())
    assert main(["--out", str(tmp_path), "--budget", "0", "--only", "speed of copies"]) == 1
    (outcome,) = json.loads((tmp_path / "summary.json").read_text())
    assert outcome["status"] == "failed" and "absent.so" in outcome["line"]


def test_a_rehearsal_pretends_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks no process for devices, which would skip steps if it came late."""
    monkeypatch.setenv(REHEARSED, "8")
    place = place_in(tmp_path, rehearsal=True)
    steps = [step for step in (*first_steps(), *second_steps()) if step.rehearsed]
    assert [step.name for step in steps if why_skipped(step, place)] == []


def test_whatever_becomes_of_a_step_the_others_run(tmp_path: Path) -> None:
    chosen = [
        python("wrong", "import sys; print('a word'); sys.exit('error: no such thing')"),
        python("dead", "import os; os.abort()"),
        python("late", "import time\ndef wait(): time.sleep(60)\nwait()", limit_s=5.0),
        Step("absent", "", (str(tmp_path / "no-such-program"),), 10),
        python("right", "print('2 passed in 1 s'); print('bye')", telling="passed"),
    ]
    start_s = time.monotonic()
    found = {outcome.step: outcome for outcome in run_all(chosen, place_in(tmp_path))}
    assert time.monotonic() - start_s < allowed_s(44)
    assert [found[step.name].status for step in chosen] == [
        "failed", "failed", "timeout", "failed", "ok"
    ]  # fmt: skip
    assert found["wrong"].line == "error: no such thing"
    assert "not done after 5 s" in found["late"].line and 'File "<string>", line' in (
        found["late"].line
    )
    assert "No such file" in found["absent"].line
    assert found["right"].line == "2 passed in 1 s"


def test_a_silent_step_is_given_up(tmp_path: Path) -> None:
    """One that writes is not, however long it takes."""
    writes = "import time\nfor i in range(8): print(i, flush=True); time.sleep(0.5)"
    chosen = [
        python("hangs", "import time; print('here', flush=True); time.sleep(60)", quiet_s=3.0),
        python("writes", writes, quiet_s=3.0),
    ]
    hangs, written = run_all(chosen, place_in(tmp_path))
    assert (hangs.status, written.status) == ("timeout", "ok")
    assert hangs.line.startswith("silent for 3 s; ") and hangs.seconds < allowed_s(15)


@pytest.mark.parametrize("alone", [False, True])
def test_only_steps_that_measure_are_alone(tmp_path: Path, alone: bool) -> None:
    """Nor does NCCL write a log meanwhile."""
    meet = (
        "import os, pathlib, sys, time\n"
        "here = pathlib.Path({folder!r}); (here / sys.argv[1]).touch()\n"
        "end = time.monotonic() + {wait}\n"
        "while len(list(here.iterdir())) < 2 and time.monotonic() < end: time.sleep(0.05)\n"
        "print(len(list(here.iterdir())), os.environ.get('NCCL_DEBUG'))\n"
        "(here / sys.argv[1]).unlink() if {alone} else None\n"
    )
    folder = tmp_path / "met"
    folder.mkdir()
    code = meet.format(folder=str(folder), wait=1 if alone else 50, alone=alone)
    chosen = [
        Step(name, "", (sys.executable, "-c", code, name), 60, quiet_s=60, alone=alone)
        for name in ("a", "b")
    ]
    lines = [outcome.line for outcome in run_all(chosen, place_in(tmp_path))]
    assert lines == (["1 None", "1 None"] if alone else ["2 INFO", "2 INFO"])


def test_steps_beside_each_other(tmp_path: Path) -> None:
    a, b, c, d = (python(name, "", alone=name in "cd") for name in "abcd")
    assert [*batches([a, b, c, d, a], place_in(tmp_path))] == [[a, b], [c], [d], [a]]
    assert [*batches([a, b, c, d], place_in(tmp_path, rehearsal=True))] == [[a, b, c, d]]


def test_nothing_outlives_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a process in a session of its own, as torchrun starts them, without pidfds."""
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    place = place_in(tmp_path)
    (outcome,) = run_all([python("parent", code, limit_s=2.0)], place)
    assert outcome.status == "timeout"
    said = (place.logs / "parent.log").read_text().splitlines()
    (pid,) = [line.split()[1] for line in said if line.startswith("child")]
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < deadline_s:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            break  # dead, and nobody has asked for its status
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_no_step_begins_without_time(tmp_path: Path) -> None:
    chosen = [python("first", "print('here')"), python("second", "print('there')")]
    outcomes = run_all(chosen, place_in(tmp_path, budget_s=1.0))
    assert [outcome.status for outcome in outcomes] == ["skipped", "skipped"]
    assert "--from 'second' goes on here" in outcomes[1].line


def test_the_archive_is_whole_after_each_step(tmp_path: Path) -> None:
    """However the runner ends, three files have all that was written until then."""
    place = place_in(tmp_path)
    code = "import os; open(os.environ['NCCL_DEBUG_FILE'].replace('%', ''), 'w').write('NCCL')"
    chosen = [python("one step", code), python("another", "print('here')", alone=True)]
    seen: list[set[str]] = []

    def look(outcome: object) -> None:
        assert {p.name for p in place.out.iterdir()} == {"logs.zip", "summary.json", "table.txt"}
        with zipfile.ZipFile(place.out / "logs.zip") as archive:
            assert archive.testzip() is None
            seen.append({name for name in archive.namelist() if not name.endswith("/")})

    run_all(chosen, place, look)
    first = {"one-step.log", "nccl/one-step.h.p.log"}
    assert seen == [first, {*first, "another.log"}]


@pytest.mark.parametrize(
    ("text", "code", "status", "line"),
    [
        ("F.\nE   assert 1 == 2\nFAILED t.py::test - assert 1 == 2\n1 failed", 1, "failed",
         "FAILED t.py::test - assert 1 == 2"),
        ("ss\nSKIPPED [2] tests/gpu/t.py:9: needs a GPU: none\n2 skipped in 0.1s", 0, "skipped",
         "needs a GPU: none"),
        (".s\nSKIPPED [1] tests/gpu/t.py:9: no CuPy\n1 passed, 1 skipped", 0, "ok",
         "1 passed, 1 skipped"),
        ("error: nothing is measured: none", 3, "skipped", "error: nothing is measured: none"),
        ("no tests ran in 0.1s", 5, "skipped", "no tests ran in 0.1s"),
        ("", 0, "ok", "it printed nothing"),
        ("word", -11, "failed", "exit status -11: word"),
    ],
)  # fmt: skip
def test_the_line_that_tells_most(text: str, code: int, status: str, line: str) -> None:
    assert read(f"$ command\n{text}", code, r"\d+ passed") == (status, line)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(place: Place) -> tuple[int, str]:
        asked.append("once")
        return 1, "NCCL 2.28.9 refuses"

    monkeypatch.setattr(Place, "_asked", answer)
    two = Step("two", "", ("true",), 1, gpus=2)
    place = place_in(tmp_path)
    assert why_skipped(two, place) == "needs 2 GPUs, and there are 1"
    shared = Step("shared", "", ("true",), 1, shares_a_gpu=True)
    assert why_skipped(shared, place) == why_skipped(shared, place) == "NCCL 2.28.9 refuses"
    assert asked == ["once"]
    tool = Step("tool", "", ("no-such-tool",), 1, tools=("no-such-tool",))
    assert why_skipped(tool, place) == "not found: no-such-tool"
    alone = Step("alone", "", ("true",), 1, rehearsed=False)
    assert why_skipped(alone, place_in(tmp_path, rehearsal=True)) == "not over the doubles"
    build = first_steps()[0]
    assert why_skipped(build, place_in(tmp_path, is_built=True)) == "the native core came along"


def test_steps_name_what_there_is() -> None:
    steps = (*first_steps(), *second_steps())
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    for step in steps:
        for part in step.command:
            if part.startswith("tests/"):
                assert (ROOT / part).exists(), (step.name, part)


def test_unknown_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no step is called kernel"):
        main(["--out", str(tmp_path), "--only", "kernel"])


def test_a_packed_nccl_is_unpacked(tmp_path: Path) -> None:
    packed = tmp_path / "libnccl.so.2.xz"
    packed.write_bytes(lzma.compress(b"NCCL"))
    (tmp_path / "scratch").mkdir()
    unpacked = _nccl(str(packed), tmp_path / "scratch")
    assert unpacked == str(tmp_path / "scratch" / "libnccl.so.2")
    assert Path(unpacked).read_bytes() == b"NCCL"
    assert _nccl(unpacked, tmp_path) == unpacked
