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

from tests.doubles.build import NoCompiler, library
from tests.gpu.first.__main__ import main
from tests.gpu.first.runner import ROOT, Place, read, run_all, why_skipped
from tests.gpu.first.steps import Step, steps
from tests.patience import allowed_s

# Each of three steps imports torch in a process of its own.
LIMIT_S = 250.0


def python(name: str, code: str, limit_s: float = 60.0, telling: str = "") -> Step:
    return Step(name, "", (sys.executable, "-c", code), limit_s, telling)


def test_the_quick_steps_over_the_doubles(tmp_path: Path) -> None:
    try:
        double = str(library())
    except NoCompiler as error:
        pytest.skip(str(error))
    variables = {"GPUDIST_NCCL_LIBRARY": double, "GPUDIST_DEVICE_LIBRARY": double}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.first", "--quick", "--out", str(tmp_path)],
        cwd=ROOT, env={**os.environ, **variables}, timeout=LIMIT_S, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    found = {outcome["step"]: outcome["status"] for outcome in summary}
    done = {name: status for name, status in found.items() if status != "skipped"}
    assert done == dict.fromkeys(("import", "environment", "self communicator"), "ok")
    assert "a rehearsal over the doubles" in ended.stdout
    for outcome in summary:
        assert outcome["line"] and f"{outcome['step']:<26}{outcome['status']}" in ended.stdout
    assert {path.stem for path in tmp_path.glob("*.log")} == {
        "import", "environment", "self-communicator"
    }  # fmt: skip


def test_whatever_becomes_of_a_step_the_others_run(tmp_path: Path) -> None:
    chosen = [
        python("wrong", "import sys; print('a word'); sys.exit('error: no such thing')"),
        python("dead", "import os; os.abort()"),
        python("late", "import time\ndef wait(): time.sleep(60)\nwait()", limit_s=5.0),
        Step("absent", "", (str(tmp_path / "no-such-program"),), 10),
        python("right", "print('2 passed in 1 s'); print('bye')", telling="passed"),
    ]
    start_s = time.monotonic()
    found = {outcome.step: outcome for outcome in run_all(chosen, Place(tmp_path))}
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


def test_nothing_outlives_a_step(tmp_path: Path) -> None:
    """Not even a process in a session of its own, as torchrun starts them."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\n"
        "print('child', child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    (outcome,) = run_all([python("parent", code, limit_s=2.0)], Place(tmp_path))
    assert outcome.status == "timeout"
    said = (tmp_path / "parent.log").read_text().splitlines()
    (pid,) = [line.split()[1] for line in said if line.startswith("child")]
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < deadline_s:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():
            break  # dead, and nobody has asked for its status
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_no_step_begins_without_time(tmp_path: Path) -> None:
    chosen = [python("first", "print('here')"), python("second", "print('there')")]
    outcomes = run_all(chosen, Place(tmp_path, budget_s=1.0))
    assert [outcome.status for outcome in outcomes] == ["skipped", "skipped"]
    assert "--from 'second' goes on here" in outcomes[1].line


def test_logs_are_packed(tmp_path: Path) -> None:
    """Pack logs as soon as a step has ended: however the runner ends, few loose files remain."""
    code = "import os; open(os.environ['NCCL_DEBUG_FILE'].replace('%', ''), 'w').write('NCCL')"
    chosen = [python("one step", code), python("another", "print('here')")]
    run_all(chosen, Place(tmp_path, packed=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs.zip", "nccl", "summary.json"]
    assert not list((tmp_path / "nccl").iterdir())
    with zipfile.ZipFile(tmp_path / "logs.zip") as archive:
        assert archive.namelist() == ["nccl/one-step.h.p.log", "one-step.log", "another.log"]
        assert archive.read("nccl/one-step.h.p.log") == b"NCCL"


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


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    two = Step("two", "", ("true",), 1, gpus=2)
    assert why_skipped(two, Place(tmp_path, gpus=1)) == "needs 2 GPUs, and there are 1"
    assert why_skipped(two, Place(tmp_path, gpus=2)) == ""
    tool = Step("tool", "", ("no-such-tool",), 1, tools=("no-such-tool",))
    assert why_skipped(tool, Place(tmp_path)) == "not found: no-such-tool"
    alone = Step("alone", "", ("true",), 1, rehearsed=False)
    assert why_skipped(alone, Place(tmp_path, rehearsal=True)) == "not over the doubles"


def test_steps_name_what_there_is() -> None:
    names = [step.name for step in steps()]
    assert len(set(names)) == len(names)
    for step in steps():
        for part in step.command:
            if part.startswith("tests/"):
                assert (ROOT / part).exists(), (step.name, part)


def test_unknown_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no step is called kernel"):
        main(["--out", str(tmp_path), "--only", "kernel"])
