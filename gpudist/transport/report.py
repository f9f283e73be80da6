"""Reports of a rank's last operations, written on failures and on SIGUSR1."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpudist.errors import GpudistError
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure

_SHOWN = 10
_KEPT = 64
_QUIET_S = 0.1
_PIPE_BYTES = 1 << 16
_STDERR = 2


def report(wire: Transport, why: str, last: int = _SHOWN) -> str:
    """Return the reason for the report and this rank's last operations, the most recent last."""
    lines = [
        f"gpudist: rank {wire.rank} of {wire.size}, process {os.getpid()} on "
        f"{socket.gethostname()}, {why}"
    ]
    for each in wire.wires:
        done = each.recorder.lines(last)
        lines.append(f"  last operations over {each.name}:" + ("" if done else " none"))
        lines += [f"    {line}" for line in done]
    return "\n".join(lines) + "\n"


def write_report(folder: str, wire: Transport, why: str, stacks: str = "") -> None:
    """Append the report to ``rank-RANK-PROCESS.txt`` in ``folder``. Never raises."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank-{wire.rank}-{os.getpid()}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(report(wire, why, _KEPT) + stacks)
    except OSError as error:
        sys.stderr.write(f"gpudist: no report in {folder}: {error}\n")


def write_error_file(path: str, error: GpudistError, rank: int, reported: str = "") -> None:
    """Write the error to torchrun's error file: torchrun kills other ranks before they report."""
    if not path or os.path.exists(path):
        return
    lines = [f"rank {rank}: {type(error).__name__}: {error}", *reported.splitlines()]
    message = {
        "message": "\n".join(lines),
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(time.time())),
        },
    }
    # Torchrun fails on a part of a file, which this rank would leave if it were killed here. The
    # error itself is printed in any case.
    unfinished = f"{path}.{os.getpid()}"
    with suppress(OSError):
        with open(unfinished, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)
        os.replace(unfinished, path)


def report_failures(folder: str, wire: Transport) -> None:
    """Write one report to ``folder`` when this rank learns that the world of ``wire`` failed."""

    def write(failure: Failure) -> None:
        write_report(folder, wire, f"failed with {failure.kind}: {failure.message}")

    wire.on_failure = write


def report_on_signal(wire: Transport, folder: str = "") -> bool:
    """On SIGUSR1, write the report and the stack of every thread to standard error.

    This works while the rank waits in native code: the handler does not need the interpreter, and a
    separate thread writes the report. If the program already has a handler, it is kept. Forked
    children, which have no such thread, write their stacks.

    Args:
        wire: transport of this rank.
        folder: folder for a copy of the report; empty for none.

    Returns:
        Whether the handler was installed.
    """
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    asked, answered = os.pipe()
    # A handler that blocks on a full pipe would block the process.
    os.set_blocking(answered, False)
    faulthandler.register(signal.SIGUSR1, file=answered, all_threads=True)
    os.register_at_fork(after_in_child=_report_stacks_only)

    def write(stacks: str) -> None:
        sys.stderr.write(report(wire, "was asked") + stacks)
        sys.stderr.flush()
        if folder:
            write_report(folder, wire, "was asked", stacks)

    threading.Thread(
        target=_answer, args=(asked, write), name="gpudist reports", daemon=True
    ).start()
    return True


def _report_stacks_only() -> None:
    # Otherwise the parent would report what its child was asked.
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        faulthandler.register(signal.SIGUSR1, file=_STDERR, all_threads=True)


def _answer(asked: int, write: Callable[[str], None]) -> None:
    while True:
        stacks = os.read(asked, _PIPE_BYTES)
        while select.select([asked], [], [], _QUIET_S)[0]:
            stacks += os.read(asked, _PIPE_BYTES)
        write(stacks.decode(errors="replace"))
