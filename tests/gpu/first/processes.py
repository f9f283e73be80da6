"""Processes of a step: watched for silence, and ended with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STACKS_S = 3.0
PAUSE_S = 0.1


class Late(Exception):
    """A process was ended: it took too long, or was silent for too long."""


def run(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], log: Path, limit_s: float,
    quiet_s: float,
) -> int:  # fmt: skip
    """Run ``command`` with its output at the end of ``log``; return its exit status.

    Raises:
        Late: it was not done after ``limit_s``, or wrote nothing for ``quiet_s``.
        OSError: there is no such program.
    """
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    start_s = told_s = time.monotonic()
    size = 0
    try:
        while (code := process.poll()) is None:
            now_s = time.monotonic()
            if log.stat().st_size != size:
                size, told_s = log.stat().st_size, now_s
            if now_s - start_s > limit_s:
                raise Late(f"not done after {limit_s:.3g} s")
            if now_s - told_s > quiet_s:
                raise Late(f"silent for {quiet_s:.3g} s")
            time.sleep(PAUSE_S)
    except BaseException:
        end(process)
        raise
    return code


def end(process: subprocess.Popen[bytes]) -> None:
    """Let Python's processes leave their stacks, then kill all that the step has started."""
    # Those that torchrun starts are in sessions of their own.
    others = _descendants(process.pid)
    _signal(process.pid, others, signal.SIGABRT)
    deadline_s = time.monotonic() + STACKS_S
    # Not reaped, so that its number stays that of its group.
    while time.monotonic() < deadline_s and not _has_ended(process.pid):
        time.sleep(PAUSE_S)
    _signal(process.pid, others, signal.SIGKILL)
    process.wait()


def _signal(group: int, others: Mapping[int, str], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
    for pid, started in others.items():
        # The number may be another process's since.
        if started == _stat(pid)[1]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _has_ended(pid: int) -> bool:
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, options) is not None


def _descendants(pid: int) -> dict[int, str]:
    # With the time of their start, by which the number of a process is told from a later one's.
    stats = {int(path.name): _stat(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for one in found:
        found += [child for child, (parent, _) in stats.items() if parent == one]
    return {child: stats[child][1] for child in found[1:]}


def _stat(pid: int) -> tuple[int, str]:
    # The parent, and the time of the start.
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return -1, ""
    return int(fields[1]), fields[19]
