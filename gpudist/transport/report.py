"""What a rank did last, in words: for its failures, and for whoever asks it by a signal."""

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


def report(transport: Transport, why: str, last: int = _SHOWN) -> str:
    """The last operations of this rank, most recent at the end, and the reason for the report."""
    lines = [
        f"gpudist: rank {transport.rank} of {transport.size}, process {os.getpid()} on "
        f"{socket.gethostname()}, {why}"
    ]
    for wire in transport.wires:
        done = wire.recorder.lines(last)
        lines.append(f"  last operations over {wire.name}:" + ("" if done else " none"))
        lines += [f"    {line}" for line in done]
    return "\n".join(lines) + "\n"


def write_report(folder: str, transport: Transport, why: str, stacks: str = "") -> None:
    """Add the report to this rank's file in ``folder``, ``rank-RANK-PROCESS.txt``. Never raises."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank-{transport.rank}-{os.getpid()}.txt"
        with path.open("a", encoding="utf-8") as file:
            file.write(report(transport, why, _KEPT) + stacks)
    except OSError as error:
        sys.stderr.write(f"gpudist: no report in {folder}: {error}\n")


def write_error_file(path: str, error: GpudistError, rank: int, reported: str = "") -> None:
    """The cause, where torchrun looks for it: it ends the other ranks before they can tell."""
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
    # The error itself is shown in any case.
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def report_failures(folder: str, transport: Transport) -> None:
    """Write the report when the world of ``transport`` has failed, once, as this rank learns it."""

    def write(failure: Failure) -> None:
        write_report(folder, transport, f"failed with {failure.kind}: {failure.message}")

    transport.on_failure = write


def report_on_signal(transport: Transport, folder: str = "") -> bool:
    """On SIGUSR1, write the report and the stack of every thread to standard error.

    Also while the rank waits in native code: the handler needs no interpreter, and the report is
    written by a thread of its own. Nothing is done where the program has a handler already.

    Args:
        transport: of this rank.
        folder: also write to this rank's file there, unless empty.

    Returns:
        Whether it will be done.
    """
    if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False
    asked, answered = os.pipe()
    # A handler that waits for room in the pipe would hold up the whole process.
    os.set_blocking(answered, False)
    faulthandler.register(signal.SIGUSR1, file=answered, all_threads=True)

    def write(stacks: str) -> None:
        sys.stderr.write(report(transport, "was asked") + stacks)
        sys.stderr.flush()
        if folder:
            write_report(folder, transport, "was asked", stacks)

    threading.Thread(
        target=_answer, args=(asked, write), name="gpudist reports", daemon=True
    ).start()
    return True


def _answer(asked: int, write: Callable[[str], None]) -> None:
    while True:
        stacks = os.read(asked, _PIPE_BYTES)
        while select.select([asked], [], [], _QUIET_S)[0]:
            stacks += os.read(asked, _PIPE_BYTES)
        write(stacks.decode(errors="replace"))
