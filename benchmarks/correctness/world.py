"""The process of a library that runs cases, from the side that judges them."""

from __future__ import annotations

import os
import socket
import subprocess
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.correctness.case import Case, Layout
from benchmarks.correctness.judge import Verdict, expected, judge
from benchmarks.correctness.ranks import About
from benchmarks.environment import ROOT

START_S = 1200.0
END_S = 10.0
# Beyond a case's limit: forks and pipes.
SPARE_S = 60.0


class CannotStart(Exception):
    """The adapter's process did not start; the message ends with its last output."""


class Library:
    """Runs cases by an adapter, in a Python of its own.

    Attributes:
        version, commit: version of the library, and the commit of its source if known.
    """

    def __init__(self, adapter: str, python: Path, log: Path, limit_s: float) -> None:
        self._limit_s = limit_s
        self._is_fresh = True
        self._log = log
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.correctness.ranks", adapter, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        self._connection = Connection(ours.detach())
        about: About = self._receive(START_S)
        self.version, self.commit = about.version, about.commit

    def verdict(self, case: Case, layout: Layout) -> Verdict:
        """Run and judge a case.

        A verdict other than right comes from processes that have run nothing before.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = expected(case, layout)
        verdict = self._judged(right, case, layout)
        if verdict.kind not in ("right", "not offered") and not self._is_fresh:
            self._is_fresh = True
            verdict = self._judged(right, case, layout)
        self._is_fresh = verdict.kind not in ("right", "not offered")
        return verdict

    def _judged(self, right: Any, case: Case, layout: Layout) -> Verdict:
        self._connection.send((case.name, layout, self._limit_s, self._is_fresh))
        answers = self._receive(self._limit_s + SPARE_S)
        return judge(right, answers, case.tolerance)

    def _receive(self, limit_s: float) -> Any:
        try:
            if self._connection.poll(limit_s):
                return self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.wait(END_S)
        text = self._log.read_text(errors="replace")[-2000:].strip()
        raise CannotStart(f"the adapter's process ended or did not answer:\n{text}")

    def __enter__(self) -> Library:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
