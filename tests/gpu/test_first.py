"""The runner of the first minutes, and its steps as far as a machine without a GPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests import warm
from tests.doubles.build import NoCompiler, library
from tests.gpu.first.runner import ROOT, Place, run_all
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


def test_steps_name_what_there_is() -> None:
    steps = (*first_steps(), *second_steps())
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    for step in steps:
        for part in step.command:
            if part.startswith("tests/"):
                assert (ROOT / part).exists(), (step.name, part)
