"""State of other processes on this node, and system calls that this process may use."""

from __future__ import annotations

import errno
import os
import select
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from gpudist.transport.host.beacon import is_beside

# Errors of a system that forbids or does not implement a call.
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS)
_POLL_S = 0.2


def forbidden_call() -> str:
    """Return the first system call required for shared memory that fails; ``""`` if none."""
    for name, call in (
        ("memfd_create", lambda: os.memfd_create("gpudist")),
        ("pidfd_open", lambda: os.pidfd_open(os.getpid())),
    ):
        try:
            os.close(call())
        except OSError as error:
            return f"{name} ({error.strerror})"
    return ""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. Zombies count as ended."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        # The id is unused, or belongs to a thread or a session instead of a process.
        if error.errno in (errno.ESRCH, errno.EINVAL):
            return True
        if error.errno in _FORBIDDEN:
            return _state(pid) in "ZX"
        raise
    try:
        return _is_readable(process, 0)
    finally:
        os.close(process)


def stopped_text(pid: int) -> str:
    """Return a text about a process that a signal or a debugger has stopped, otherwise ``""``."""
    is_stopped = _state(pid) in ("T", "t")
    return f"; its process {pid} is stopped (kill -CONT {pid} continues it)" if is_stopped else ""


class Neighbours:
    """Processes of other ranks that are on this node.

    Args:
        beacons: text of each rank's beacon, by rank.

    Attributes:
        pids: process ids, by rank.
    """

    def __init__(self, beacons: Mapping[int, str]) -> None:
        self._processes: dict[int, int] = {}
        self.pids: dict[int, int] = {}
        for rank, text in beacons.items():
            # Otherwise, a forked child that holds its sockets could hide the death of a process.
            with suppress(OSError, ValueError, IndexError):
                pid = int(text.split()[0])
                process = os.pidfd_open(pid)
                if is_beside(text):
                    self._processes[rank], self.pids[rank] = process, pid
                else:
                    os.close(process)

    def dead(self, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` whose process has ended."""
        known = self._processes
        return [rank for rank in ranks if rank in known and _is_readable(known[rank], 0)]

    def close(self) -> None:
        while self._processes:
            os.close(self._processes.popitem()[1])


def await_end_of_parent(parent: int) -> None:
    """Wait until the process ``parent``, which started this one, has ended."""
    try:
        process = os.pidfd_open(parent)
    except (OSError, AttributeError):
        process = -1
    # Another process may have reused the id before this one opened it.
    if process >= 0 and os.getppid() == parent:
        _is_readable(process, None)
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    if process >= 0:
        os.close(process)


def _is_readable(process: int, timeout_ms: int | None) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(timeout_ms))


def _state(pid: int) -> str:
    try:
        # The name in brackets may itself contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def has_variable(pid: int, name: str) -> bool:
    """Return whether a process was started with this environment variable; ``False`` if unknown."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(f"{name}=".encode()) for entry in environment.split(b"\0"))
