"""Worlds of ranks: started by their own launchers, controlled over sockets, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.environment import ROOT
from benchmarks.service import Hello, Turn

START_S = 120.0
ANSWER_S = 180.0
END_S = 10.0
MPI_NAMES = ("openmpi", "mpich")


class WorldFailed(Exception):
    """A world died, hung, or never started; the message ends with its last output."""


@dataclass(frozen=True)
class Pages:
    """Malloc's treatment of large blocks, the same in every world.

    Attributes:
        suffix: text added to the name of a case.
        environment: glibc's settings.
        recycled: whether freed blocks are reused; otherwise every block is new from the system.
    """

    suffix: str
    environment: dict[str, str]
    recycled: bool


RECYCLED = Pages(
    "",
    {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 62),
        "MALLOC_TOP_PAD_": str(64 << 20),
        "MALLOC_ARENA_MAX": "1",  # gloo's threads would use heaps that return their pages.
    },
    True,
)
NEW = Pages(
    ", new pages",
    {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    False,
)


@dataclass(frozen=True)
class Launch:
    """How to start a world: its name, its command except the address, its environment."""

    name: str
    command: list[str]
    environment: dict[str, str]


def ours(ranks: int, pages: Pages) -> Launch:
    """Return gpudist over shared memory; gloo, DTensor and torch run in the same processes."""
    command = [sys.executable, "-m", "benchmarks.ranks", str(ranks)]
    options = [] if pages.recycled else ["--new-pages"]
    return Launch("gpudist", [*command, *options], pages.environment)


def mpi(name: str, peers: Path, ranks: int, pages: Pages) -> Launch:
    """Return the MPI in the venv ``name`` under ``peers``, with its mpirun and default settings."""
    folder = peers.absolute() / name / "bin"
    command = [str(folder / "mpirun"), "-n", str(ranks)]
    environment = dict(pages.environment)
    if name != "mpich":
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if ranks > (os.cpu_count() or 1):
            command += ["--map-by", ":OVERSUBSCRIBE"]
    rank = [str(folder / "python"), "-m", "benchmarks.peers.mpi", name]
    return Launch(name, [*command, *rank], environment)


def installed(peers: Path) -> list[str]:
    """Return the MPIs that have a venv under ``peers``."""
    return [name for name in MPI_NAMES if (peers / name / "bin" / "mpirun").exists()]


class World:
    """The controller's side of a world: every order is sent to all its ranks, and all answer."""

    def __init__(self, launch: Launch, ranks: int, folder: Path) -> None:
        self.name = launch.name
        self.ranks = ranks
        self.versions: dict[str, str] = {}
        self._connections: list[Connection] = []
        self._pids: list[int] = []
        self._log = folder / f"{launch.name}.log"
        self.address = str(folder / f"{launch.name}.socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(ranks)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*launch.command, self.address],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **launch.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def connect(self) -> None:
        """Wait until every rank has sent its hello."""
        deadline_s = time.monotonic() + START_S
        hellos: dict[int, tuple[Hello, Connection]] = {}
        self._listener.settimeout(0.2)
        while len(hellos) < self.ranks:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise self._failed(f"{len(hellos)} of {self.ranks} ranks came up")
            with contextlib.suppress(TimeoutError):
                accepted, _ = self._listener.accept()
                accepted.setblocking(True)
                connection = Connection(accepted.detach())
                hello: Hello = connection.recv()
                hellos[hello.rank] = hello, connection
                self._pids.append(os.pidfd_open(hello.pid))
        self._connections = [hellos[rank][1] for rank in range(self.ranks)]
        self.versions = hellos[0][0].versions

    def prepare(self, case: Case) -> list[str]:
        """Build this world's sides of ``case``; return their names."""
        names = self._ask("prepare", case)
        if any(other != names[0] for other in names):
            raise self._failed(f"the ranks disagree on the sides of {case.subject}: {names}")
        return names[0]

    def check(self, name: str) -> bool:
        """Whether the side's result is right on every rank."""
        return all(self._ask("check", name))

    def peak_mib(self, name: str) -> float:
        """Return the peak memory of the side's call, the maximum over ranks; see ``peak``."""
        return max(self._ask("peak", name))

    def time(self, name: str, calls: int, iterations: int) -> Turn:
        """Return microseconds and new pages per call, the maximum over ranks."""
        turns: list[Turn] = self._ask("time", name, calls, iterations)
        us = [max(times) for times in zip(*[turn.us for turn in turns], strict=True)]
        return Turn(us, max(turn.new_pages for turn in turns) // (calls * iterations))

    def _ask(self, verb: str, *arguments: Any) -> list[Any]:
        answers: dict[int, Any] = {}
        try:
            for connection in self._connections:
                connection.send((verb, arguments))
            deadline_s = time.monotonic() + ANSWER_S
            missing = dict(enumerate(self._connections))
            while missing:
                ready = wait(list(missing.values()), deadline_s - time.monotonic())
                if not ready:
                    raise self._failed(
                        f"ranks {list(missing)} did not answer within {ANSWER_S:g} s: "
                        f"{verb} {arguments}"
                    )
                for rank in [rank for rank, each in missing.items() if each in ready]:
                    answers[rank] = missing.pop(rank).recv()
        except (EOFError, ConnectionError) as error:
            raise self._failed(f"a rank died: {verb} {arguments}") from error
        return [answers[rank] for rank in range(self.ranks)]

    def _failed(self, what: str) -> WorldFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # its launcher prints why a rank ended
        text = self._log.read_text(errors="replace")[-4000:].strip()
        return WorldFailed(f"world {self.name!r} of {self.ranks} ranks: {what}\n{text}")

    def close(self) -> None:
        """End the ranks: by an order, else by signals to this world's own processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(("end", ()))
            connection.close()
        self._listener.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
                break
        # Some launchers put ranks in other process groups; a pidfd never refers to another process.
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pid, signal.SIGKILL)
            os.close(pid)


@contextlib.contextmanager
def started(launches: Sequence[Launch], ranks: int) -> Iterator[list[World]]:
    """Start worlds of ``ranks`` ranks each and yield them; end them on exit, whatever happened."""
    worlds: list[World] = []
    with tempfile.TemporaryDirectory(prefix="gpudist-bench-") as folder:
        try:
            for launch in launches:
                worlds.append(World(launch, ranks, Path(folder)))
            for world in worlds:
                world.connect()
            yield worlds
        finally:
            for world in worlds:
                world.close()
