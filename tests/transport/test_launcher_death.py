"""Workers whose launcher is killed all end, instead of continuing as orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpudist.transport.host.processes import await_end_of_parent
from tests.doubles import use_doubles

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, pathlib, sys, time
import gpudist

P_world = gpudist.init(timeout=60)
mine = pathlib.Path(sys.argv[1]) / f"rank-{P_world.rank}"
mine.with_suffix(".pid").write_text(str(os.getpid()))
try:
    while True:
        if P_world.rank == 1 and sys.argv[2] == "busy":
            time.sleep(0.01)
        P_world.barrier()
        mine.with_suffix(".lives").touch()
        if P_world.rank == 1 and sys.argv[2] == "waits":
            time.sleep(60)
except gpudist.errors.TransportError as error:
    mine.with_suffix(".part").write_text(f"{type(error).__name__}: {error}")
    mine.with_suffix(".part").rename(mine.with_suffix(".heard"))
    raise
"""
LIMIT_S = 120.0


def awaited(path: Path, process: subprocess.Popen[bytes] | None = None) -> str:
    """Return the contents of the file as soon as it exists."""
    deadline_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"no {path.name}: {list(path.parent.iterdir())}"
        assert process is None or process.poll() is None, "torchrun has ended"
        time.sleep(0.02)
    return path.read_text()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("transport", "does"),
    [("host", "busy"), ("host", "waits"), ("gloo", "busy"), ("gloo", "waits"), ("nccl", "waits")],
)
def test_workers_hear_of_the_launchers_death(tmp_path: Path, transport: str, does: str) -> None:
    """Some workers continue to exchange messages, and one waits for another."""
    if transport == "nccl":
        use_doubles()
    program = tmp_path / "trains.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GPUDIST_TRANSPORT": transport,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (tmp_path / "output").open("w") as output:
        agent = subprocess.Popen(
            [sys.executable, *launcher, str(program), str(tmp_path), does],
            env=environment, stdout=output, stderr=output,
        )  # fmt: skip
    pids: list[int] = []
    try:
        for rank in range(2):
            awaited(tmp_path / f"rank-{rank}.lives", agent)
            pids.append(int((tmp_path / f"rank-{rank}.pid").read_text()))
        agent.kill()
        agent.wait()
        for rank in range(1 if does == "waits" else 2):
            text = awaited(tmp_path / f"rank-{rank}.heard")
            # Over gloo and nccl a wait may first detect that the agent's store has ended.
            assert "torchrun's agent" in text and "has ended" in text
            if transport == "host":
                assert "the launcher has died: torchrun's agent of rank" in text
                assert f"process {agent.pid}, has ended before its workers" in text
    finally:
        agent.kill()
        agent.wait()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.mark.parametrize("can_open", [True, False])
def test_the_end_of_a_parent(can_open: bool) -> None:
    """The end is detected, also if the system does not let processes watch each other."""
    ours, theirs = os.pipe()
    parent = os.fork()
    if parent == 0:
        # The child may begin only after its parent's end.
        its_parent = os.getpid()
        if os.fork() == 0:
            if not can_open:
                del os.pidfd_open
            await_end_of_parent(its_parent)
            os.write(theirs, b"ended")
        else:
            time.sleep(0.3)
        os._exit(0)
    os.close(theirs)
    start_s = time.monotonic()
    assert os.read(ours, 5) == b"ended"
    assert time.monotonic() - start_s > 0.2
    os.waitpid(parent, 0)
    os.close(ours)
