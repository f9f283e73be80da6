"""Processes that are ranks of one world and may die: how each ended, and what it left behind."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gpudist.errors import GpudistError
from gpudist.world import runtime
from tests import warm

_ANSWER_S = 20.0
# In the name of memory of the double of NCCL, which keeps that of communicators never made.
_DOUBLE = "gpudist-double"
# In which a thread that a deadline ends has ended.
_LEAVING_S = 4.0
# If a store's host dies, torch logs it at length at every attempt.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
_LOOPBACK = "127.0.0.1"


@dataclass
class Answer:
    """How a rank's body ended, when, and what its process holds after the transport closed.

    Attributes:
        value, error: result or error of the body; ``error`` also if joining the world raised.
        end_s: monotonic time of the end.
        closing_s: seconds it took to close the transport.
        leftovers: descriptors, mappings of shared memory and threads.
    """

    value: Any = None
    error: BaseException | None = None
    end_s: float = 0.0
    closing_s: float = 0.0
    leftovers: list[str] = field(default_factory=list)


class Ranks:
    """Plain processes, each one rank of one world.

    Args:
        size: number of ranks.
        body: called with ``(P_world, *args)`` on each, at the top level of a module.
        timeout_s: deadline of every wait between ranks.
        transport: ``"host"``, ``"gloo"`` or ``"nccl"``, over the doubles.
        store_rank: the rank that serves the store; this process does if ``None``.
        before: called with ``(rank, *args)`` before a rank joins the world; else this returns when
            all have joined.
        folder: where they run; each has its temporary files there.
    """

    def __init__(
        self,
        size: int,
        body: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        transport: str = "host",
        store_rank: int | None = 0,
        before: Callable[..., None] | None = None,
        folder: str | None = None,
    ) -> None:
        warm.fork_ranks()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__"])
        self._store = None
        port = 0
        if store_rank is None:
            self._store = dist.TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
            port = self._store.port
        self.ends: list[Connection] = []
        self.strikes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            end, far_end = context.Pipe()
            strikes, far_strikes = context.Pipe(duplex=False)
            role = _Role(rank, size, timeout_s, transport, store_rank, folder)
            process = context.Process(
                target=_play,
                args=(far_end, far_strikes, role, port, runtime.variables(), before, body, args),
                daemon=True,
            )
            process.start()
            far_end.close()
            far_strikes.close()
            if store_rank == rank:
                port = end.recv()
            self.ends.append(end)
            self.strikes.append(strikes)
            self.processes.append(process)
        for end in self.ends:
            assert end.recv() == "here"
        for end in self.ends:
            end.send("begin")
        if before is None:
            for end in self.ends:
                assert end.recv() == "joined"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for end in self.ends:
            end.close()
        for process in self.processes:
            process.join(5)
            process.kill()
            process.join()
        for strikes in self.strikes:
            strikes.close()
        self._store = None

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal; when, in seconds of the monotonic clock."""
        os.kill(self.pid(rank), number)
        return time.monotonic()

    def struck_s(self, rank: int) -> float | None:
        """Return the monotonic time of the fault in a rank, ``None`` if there was none."""
        with contextlib.suppress(OSError):
            if self.strikes[rank].poll():
                data = os.read(self.strikes[rank].fileno(), 8)
                return struct.unpack("d", data)[0] if len(data) == 8 else None
        return None

    def answers(self, limit_s: float = _ANSWER_S, besides: int | None = None) -> dict[int, Answer]:
        """Return the answers of the ranks within ``limit_s``, except for rank ``besides``."""
        found: dict[int, Answer] = {}
        rank_of: dict[Any, int] = {end: r for r, end in enumerate(self.ends) if r != besides}
        deadline_s = time.monotonic() + limit_s
        while rank_of and time.monotonic() < deadline_s:
            for end in wait(list(rank_of), timeout=max(0.0, deadline_s - time.monotonic())):
                rank = rank_of.pop(end)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    found[rank] = self.ends[rank].recv()
        return found


@dataclass(frozen=True)
class _Role:
    rank: int
    size: int
    timeout_s: float
    transport: str
    store_rank: int | None
    folder: str | None

    @property
    def serves(self) -> bool:
        return self.store_rank == self.rank


# The time of the fault is written here for the parent process.
_strikes: list[int] = []


def strikes() -> int:
    return _strikes[0]


def _play(
    end: Connection,
    strikes: Connection,
    role: _Role,
    port: int,
    variables: dict[str, str],
    before: Callable[..., None] | None,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    gc.freeze()  # later collections leave out all that is imported
    runtime.set_variables(variables)
    _strikes.append(strikes.fileno())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    if role.folder is not None:
        os.chdir(role.folder)
        os.environ["TMPDIR"] = role.folder
    store = None
    if role.serves:
        store = dist.TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False)
        end.send(store.port)
    held = _held(store is not None)
    if store is None:
        store = dist.TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False)
    end.send("here")
    if end.recv() != "begin":
        return
    answer = _join_and_do(end, role, store, before, body, args)
    if not role.serves:
        del store
    patience_s = min(role.timeout_s, _LEAVING_S)
    answer.leftovers = _leftovers(role, held, answer.end_s + answer.closing_s + patience_s)
    with contextlib.suppress(BrokenPipeError):
        end.send(answer)
    with contextlib.suppress(EOFError):
        end.recv()


def _join_and_do(
    end: Connection,
    role: _Role,
    store: dist.Store,
    before: Callable[..., None] | None,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> Answer:
    answer, wire = Answer(), None
    try:
        if before is not None:
            before(role.rank, *args)
        wire = runtime.connect(
            role.transport,
            store,
            role.rank,
            role.size,
            role.timeout_s,
            "chaos",
            store_rank=role.store_rank,
        )
        if before is None:
            end.send("joined")
        answer.value = body(runtime.world_of(wire), *args)
    except BaseException as error:
        answer.error = _plain(error)
    answer.end_s = time.monotonic()
    if wire is not None:
        try:
            wire.close()
        except BaseException as error:
            answer.error = answer.error or _plain(error)
    answer.closing_s = time.monotonic() - answer.end_s
    return answer


def _plain(error: BaseException) -> BaseException:
    error = error.with_traceback(None)
    error.__cause__ = error.__context__ = None
    if not isinstance(error, (GpudistError, KeyboardInterrupt)):
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _leftovers(role: _Role, held: Counter[str], deadline_s: float) -> list[str]:
    while True:
        gc.collect()
        found = list((_held(role.serves) - held).elements()) + _of_gpudist()
        if not found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.02)


def _held(without_sockets: bool) -> Counter[str]:
    found = Counter(f"thread {thread.name}" for thread in threading.enumerate())
    for link in descriptors():
        is_passed_over = without_sockets and link.startswith("socket:")
        if not is_passed_over and _DOUBLE not in link:
            found["socket" if link.startswith("socket:") else link] += 1
    return found


def _of_gpudist() -> list[str]:
    found = descriptors() + Path("/proc/self/maps").read_text().splitlines()
    return [text for text in found if "memfd:gpudist" in text and _DOUBLE not in text]


def descriptors() -> list[str]:
    """Files, pipes and sockets that are open in this process."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found
