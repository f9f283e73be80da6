"""Python that has already imported torch and gpudist, for tests that start many processes.

``python()`` returns the path of a command that takes a script, ``-m`` or ``-c``, as the interpreter
does. It runs them in a fork of one process that has done the imports, which otherwise take most of
the time of a short program. Its arguments, environment, folder, files, signals and exit are its
own. Tests of how the interpreter starts or shuts down use ``sys.executable``. Programs that import
more are forked from a process that has imported what a given example does.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).parent
_NAMES = {
    "python": (),
    "python3": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "gpudist": ("-m", "gpudist"),
}


@functools.cache
def folder(script: str = "") -> Path:
    """Return a folder with the commands ``python``, ``python3``, ``torchrun`` and ``gpudist``."""
    made = Path(tempfile.mkdtemp(prefix="warm-"))
    address = made / "socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", str(address), *filter(None, [script])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_HERE.parents[1],
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    for name, starts in _NAMES.items():
        command = [sys.executable, "-ISB", str(_HERE / "client.py"), str(address), *starts]
        path = made / name
        path.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    # The server ends with its standard input, and that with this process at the latest.
    atexit.register(server.communicate)
    return made


def python(script: str = "") -> str:
    """Return the command to use where a test would use ``sys.executable``.

    Args:
        script: an example; what it imports is imported already.
    """
    return str(folder(script) / "python")
