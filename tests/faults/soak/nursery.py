"""Processes that end through the interpreter's exit, as programs do, forked from one with torch.

A ``multiprocessing`` process skips that exit, and one that imports torch takes seconds to start.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
READY_S = 120.0


@dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
        code: its exit status; negative for a signal, ``None`` if it had to be killed.
        seconds: its duration.
        text: its output.
    """

    code: int | None
    seconds: float
    text: str


class Nursery:
    """A process that forks ranks of small worlds, each of which calls ``gpudist.init()`` itself."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(READY_S)
        self._process.stdout.close()  # type: ignore[union-attr]

    def run(self, body: str, size: int, transport: str, limit_s: float) -> list[End]:
        """Call ``body``, ``module:function``, on ranks of a new world; how each of them ended."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        order = {
            "body": body,
            "size": size,
            "limit_s": limit_s,
            "variables": {
                "GPUDIST_TRANSPORT": transport,
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return [End(**end) for end in json.loads(self._process.stdout.readline())]


def _serve() -> None:
    """Fork what is ordered; in a child, return after its body, so that the interpreter exits."""
    import torch.distributed  # noqa: F401

    import gpudist  # noqa: F401

    # What is imported stays: the exits of the forks find no garbage in it.
    gc.freeze()
    for line in iter(sys.stdin.readline, ""):
        order = json.loads(line)
        begin_s = time.monotonic()
        pids: list[int] = []
        outputs: list[Any] = []
        for rank in range(order["size"]):
            output = tempfile.TemporaryFile()  # noqa: SIM115
            pid = os.fork()
            if pid == 0:
                _become(rank, order, output.fileno())
                return
            pids.append(pid)
            outputs.append(output)
        ends = _ends(pids, order["limit_s"], begin_s)
        for end, output in zip(ends, outputs, strict=True):
            output.seek(0)
            end["text"] = output.read().decode(errors="replace")
            output.close()
        print(json.dumps(ends), flush=True)


def _become(rank: int, order: dict[str, Any], output: int) -> None:
    os.setsid()
    os.environ |= {**order["variables"], "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(0)
    # Whoever starts tests in the background may have it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    module, _, name = order["body"].partition(":")
    getattr(importlib.import_module(module), name)(rank)


def _ends(pids: list[int], limit_s: float, begin_s: float) -> list[dict[str, Any]]:
    ends: dict[int, dict[str, Any]] = {}
    while len(ends) < len(pids):
        late = time.monotonic() - begin_s > limit_s
        for pid in pids:
            if pid in ends:
                continue
            if late:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.3)
                os.killpg(pid, signal.SIGKILL)
            found, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if found:
                code = None if late else os.waitstatus_to_exitcode(status)
                ends[pid] = {"code": code, "seconds": time.monotonic() - begin_s, "text": ""}
        time.sleep(0.01)
    return [ends[pid] for pid in pids]


if __name__ == "__main__":
    _serve()
