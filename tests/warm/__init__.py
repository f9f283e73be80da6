"""Python that has already imported torch and gpudist, for tests that start many processes.

``python()`` returns the path of a command that takes a script, ``-m`` or ``-c``, as the interpreter
does. It runs them in a fork of one process that has done the imports, which otherwise take most of
the time of a short program. Its arguments, environment, folder, files, signals and exit are its
own. Tests of how the interpreter starts or shuts down use ``sys.executable``. Programs that import
more are forked from a process that has imported what a given example does.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_HERE = Path(__file__).parent
_NAMES = {
    "python": (),
    "python3": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "gpudist": ("-m", "gpudist"),
}
_START_S = 240.0
# The process that began the run, and when: its servers serve every process that it starts.
_RUN = os.environ.setdefault("TESTS_RUN", f"{os.getpid()}-{time.time_ns()}")


@functools.cache
def folder(script: str = "") -> Path:
    """Return a folder with the commands ``python``, ``python3``, ``torchrun`` and ``gpudist``."""
    made = start(script)
    end_s = time.monotonic() + _START_S
    while not (made / "socket").exists():
        assert time.monotonic() < end_s, (made / "log").read_text() or "the server takes long"
        time.sleep(0.02)
    return made


def start(script: str = "") -> Path:
    """Start the server of a folder, unless a process of the run has; return the folder."""
    made = Path(tempfile.gettempdir()) / "-".join(["warm", _RUN, *Path(script).parts])
    with suppress(FileExistsError):
        made.mkdir()
        _start(made, script)
    return made


def _start(made: Path, script: str) -> None:
    """It ends with the process that began the run, and removes the folder."""
    address = made / "socket"
    for name, starts in _NAMES.items():
        command = [sys.executable, "-ISB", str(_HERE / "client.py"), str(address), *starts]
        path = made / name
        path.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    # What an example imports besides comes on top of what any program does.
    command = [python() if script else sys.executable, "-m", "tests.warm.server"]
    command += [str(address), _RUN.partition("-")[0], script]
    # It may outlive this process, whose output somebody reads to its end.
    nothing = os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0
    log = os.POSIX_SPAWN_OPEN, 1, str(made / "log"), os.O_WRONLY | os.O_CREAT, 0o600
    os.posix_spawn(
        command[0], command, os.environ | {"PYTHONPATH": str(_HERE.parents[1])},
        file_actions=[nothing, log, (os.POSIX_SPAWN_DUP2, 1, 2)],
    )  # fmt: skip


def python(script: str = "") -> str:
    """Return the command to use where a test would use ``sys.executable``.

    Args:
        script: an example; what it imports is imported already.
    """
    return str(folder(script) / "python")
