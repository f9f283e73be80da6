"""Python that has already imported torch and gpudist, for tests that start many processes.

``python()`` returns the path of a command that takes a script, ``-m`` or ``-c``, as the interpreter
does. It runs them in a fork of one process that has done the imports, which otherwise take most of
the time of a short program. Its arguments, environment, folder, files, signals and exit are its
own. The server from which a test process forks its ranks is such a program too. Tests of how the
interpreter starts or shuts down use ``sys.executable``.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
_NAMES = {
    "python": (),
    "python3": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "gpudist": ("-m", "gpudist"),
}
# In the environment, the folder of the run's server, which serves every process of the run.
_FOLDER = "TESTS_WARM"
_servers: list[subprocess.Popen[bytes]] = []


@cache
def folder(script: str = "") -> Path:
    """Return a folder with the commands ``python``, ``python3``, ``torchrun`` and ``gpudist``.

    Args:
        script: an example; what it imports is imported already.
    """
    if not script and _FOLDER in os.environ:
        return Path(os.environ[_FOLDER])
    made = Path(tempfile.mkdtemp(prefix="warm-"))
    for name, starts in _NAMES.items():
        words = [_interpreter(), "-ISB", str(_HERE / "client.py"), str(made / "socket"), *starts]
        path = made / name
        path.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(made / "socket"))
        listener.listen(128)
        # What an example imports comes on top of what any program does.
        start = [python() if script else _interpreter(), "-m", "tests.warm.server"]
        # The server ends when this process does, which has the other end of its input.
        server = subprocess.Popen(
            [*start, str(listener.fileno()), str(made), script],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": str(_HERE.parents[1])},
        )  # fmt: skip
    _servers.append(server)
    if not script:
        os.environ[_FOLDER] = str(made)
    return made


@cache
def _interpreter() -> str:
    return sys.executable


def python(script: str = "") -> str:
    """Return the command to use where a test would use ``sys.executable``.

    Args:
        script: an example; what it imports is imported already.
    """
    return str(folder(script) / "python")


def fork_ranks() -> None:
    """Let this process's ranks be forks of a server that is one of these programs."""
    multiprocessing.set_executable(python())


def close() -> None:
    """End the servers that this process has started."""
    for server in reversed(_servers):
        server.communicate()
    _servers.clear()
