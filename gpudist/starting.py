"""Notice of the command line while torch is imported, which takes long the first time.

``gpudist/__init__.py`` imports this module before all others, because no line of the command line
can run before torch is there. It does nothing in other programs, and without a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath


def is_command(arguments: Sequence[str]) -> bool:
    """Whether the interpreter was started as ``gpudist`` or ``python -m gpudist``."""
    script, module = arguments[1:2], arguments[1:]
    if "-m" in module:
        return module[module.index("-m") + 1 :][:1] == ["gpudist"]
    return bool(script) and PurePath(script[0]).name == "gpudist"


def show() -> None:
    """Write the notice on a line without an end, which the command line erases."""
    if is_command(sys.orig_argv) and sys.stderr.isatty():
        print("gpudist: loading torch", end="", file=sys.stderr, flush=True)


show()
