"""A hanging process reports its state on SIGUSR1, also under torchrun and in native waits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.report import report_on_signal
from tests import warm

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = r"""
import os, time
import torch
import gpudist

P_world = gpudist.init(timeout=60.0)
P_x = P_world.create_cartesian_topology_partition([2])
gpudist.all_sum_reduce(torch.ones(3), P_x, [0])
print(f"rank {P_world.rank} is {os.getpid()}\n", end="", flush=True)
if P_world.rank == 0:
    gpudist.all_sum_reduce(torch.ones(3), P_x, [0])
else:
    time.sleep(60)
"""
SHAPE = r"on [^\n]*, was asked\n  last operations over (\w+):\n((?:    #[^\n]*\n)+)"


def started(tmp_path: Path) -> subprocess.Popen[str]:
    program = tmp_path / "hangs.py"
    program.write_text(PROGRAM)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GPUDIST_TRANSPORT": "host",
        "GPUDIST_DUMP": str(tmp_path / "reports"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (tmp_path / "errors").open("w") as errors:
        return subprocess.Popen(
            [warm.python(), *command, str(program)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip


def pids_of(process: subprocess.Popen[str]) -> dict[int, int]:
    assert process.stdout is not None
    said = process.stdout.readline() + process.stdout.readline()
    return {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d) is (\d+)", said)}


def awaited(path: Path, pattern: str, limit_s: float = 15.0) -> re.Match[str]:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        found = re.search(pattern, path.read_text(), re.DOTALL) if path.exists() else None
        if found is not None:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {pattern!r} in:\n{path.read_text() if path.exists() else 'no file'}")


def test_ranks_that_hang_say_where(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        pids = pids_of(process)
        time.sleep(0.3)
        for pid in pids.values():
            os.kill(pid, signal.SIGUSR1)
        for rank, state in ((0, r"waiting for \d+\.\d s"), (1, "finished")):
            text = rf"rank {rank} of 2, process {pids[rank]} "
            found = awaited(tmp_path / "errors", text + SHAPE)
            assert found[1] == "host"
            last = found[2].splitlines()[-1]
            assert re.fullmatch(rf"    #\d+ all_sum_reduce over axes \[0\] .*: {state}", last)
            report = tmp_path / "reports" / f"rank-{rank}-{pids[rank]}.txt"
            assert awaited(report, r"hangs\.py\", line \d+ in <module>")
    finally:
        process.terminate()
        process.communicate(timeout=30)


FORKS = """
import os, signal, sys, time
import gpudist

gpudist.init()
child = os.fork()
if child == 0:
    deadline_s = time.monotonic() + 20

    def sleeps_in_the_child():
        print(os.getpid(), os.getppid(), flush=True)
        while time.monotonic() < deadline_s:
            time.sleep(0.01)

    sleeps_in_the_child()
time.sleep(60)
"""


def test_a_forked_child_reports_its_own_stacks(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [warm.python(), "-c", FORKS], text=True, stdout=subprocess.PIPE, stderr=errors
        )
    assert process.stdout is not None
    child, parent = map(int, process.stdout.readline().split())
    try:
        os.kill(child, signal.SIGUSR1)
        awaited(tmp_path / "errors", "in sleeps_in_the_child\n")
        os.kill(parent, signal.SIGUSR1)
        awaited(tmp_path / "errors", "was asked\n")
        text = (tmp_path / "errors").read_text()
        assert text.count("sleeps_in_the_child") == text.count("was asked") == 1
    finally:
        for pid in (child, parent):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=30)


def test_a_handler_of_the_programs_own_stays() -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert not report_on_signal(LoopbackTransport.single())
    finally:
        signal.signal(signal.SIGUSR1, before)
