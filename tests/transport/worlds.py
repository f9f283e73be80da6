"""Worlds of ranks for the tests of transports: threads for loopback, processes for the others."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from gpudist.errors import GpudistError
from gpudist.transport.base import Transport
from gpudist.transport.failure.channel import Failure
from gpudist.transport.loopback import LoopbackWorld
from gpudist.world import runtime
from tests import warm
from tests.doubles import use_doubles

MAX_RANKS = 5
_ANSWER_S = 30.0
_prefixes = (f"world/{number}" for number in itertools.count())


def new_store() -> dist.TCPStore:
    """Return a store that this process serves at a free port."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5)
    )


@dataclass
class Outcome:
    """Outcome of one rank: a value, an error, or, if neither, no answer."""

    value: Any = None
    error: BaseException | None = None
    end_s: float = 0.0
    answered: bool = True


class ProcessRanks:
    """Processes that each play one rank in one world after another, all over one store."""

    def __init__(self, count: int) -> None:
        # Before the processes: each of its threads counts, and they inherit this.
        os.environ["OMP_NUM_THREADS"] = "1"
        use_doubles()
        warm.fork_ranks()
        context = multiprocessing.get_context("forkserver")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = context
        self._ends: list[Connection] = []
        self.processes = []
        for rank in range(count):
            end, process = self._start(rank)
            self._ends.append(end)
            self.processes.append(process)

    def _start(self, rank: int) -> tuple[Connection, Any]:
        end, far_end = self._context.Pipe()
        process = self._context.Process(
            target=_serve,
            args=(far_end, self._store.port, rank, runtime.variables()),
            daemon=True,
        )
        process.start()
        far_end.close()
        return end, process

    def revive(self) -> None:
        """Start a process in the place of each that has died, and let it import what it needs."""
        for rank, process in enumerate(self.processes):
            process.join(0.1)
            if process.is_alive():
                continue
            self._ends[rank].close()
            self._ends[rank], self.processes[rank] = self._start(rank)
        self.run(len(self.processes), Transport.check, timeout_s=60.0, kind="nccl")

    def answer(self, rank: int) -> Outcome:
        """Return the answer of a rank that was stopped and has been resumed."""
        return _answer(self._ends[rank], time.monotonic() + _ANSWER_S)

    def run(
        self,
        size: int,
        body: Callable[..., Any],
        *args: Any,
        timeout_s: float,
        stops: int | None = None,
        kind: str = "gloo",
    ) -> list[Outcome]:
        """Return the outcome of each rank; nothing is expected of rank ``stops``."""
        prefix = next(_prefixes)
        for end in self._ends[:size]:
            end.send((kind, size, prefix, timeout_s, body, args))
        deadline_s = time.monotonic() + timeout_s + _ANSWER_S
        return [
            Outcome(answered=end.poll(0)) if rank == stops else _answer(end, deadline_s)
            for rank, end in enumerate(self._ends[:size])
        ]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for end in self._ends:
            end.close()


@functools.cache
def shared_ranks() -> ProcessRanks:
    """Return processes shared by tests in which no rank ends."""
    return ProcessRanks(MAX_RANKS)


def outcomes(
    kind: str, size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 20.0
) -> list[Outcome]:
    """Run ``body(transport, *args)`` on every rank; what became of each."""
    if kind == "loopback":
        return LoopbackWorld(size, timeout_s).run(
            lambda transport: _play(transport, transport.rank, body, args)
        )
    return shared_ranks().run(size, body, *args, timeout_s=timeout_s, kind=kind)


def results(
    kind: str, size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 20.0
) -> list[Any]:
    """Return the results of ``body(transport, *args)`` on every rank."""
    ended = outcomes(kind, size, body, *args, timeout_s=timeout_s)
    for rank, outcome in enumerate(ended):
        assert outcome.answered, f"rank {rank} gave no answer"
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in ended]


def collect() -> None:
    """Free ended worlds, and what was bound to them."""
    # References held by native objects become garbage only when those are collected.
    while gc.collect():
        pass


def _serve(end: Connection, port: int, rank: int, variables: dict[str, str]) -> None:
    runtime.set_variables(variables)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # What is imported by now lives as long as the process: searches for garbage leave it out.
    gc.freeze()
    while True:
        try:
            kind, size, prefix, timeout_s, body, args = end.recv()
        except EOFError:
            return
        try:
            transport = runtime.connect(kind, store, rank, size, timeout_s, prefix)
        except GpudistError as error:
            end.send(Outcome(error=error.with_traceback(None), end_s=time.monotonic()))
            continue
        end.send(_play(transport, rank, body, args))
        transport.close()


def _play(transport: Transport, rank: int, body: Callable[..., Any], args: Any) -> Outcome:
    try:
        return Outcome(value=body(transport, *args), end_s=time.monotonic())
    except BaseException as error:
        end_s = time.monotonic()
        transport.abort(Failure.from_exception(error, rank))
        # Neither traceback nor cause can be sent.
        return Outcome(error=error.with_traceback(None), end_s=end_s)


def _answer(end: Connection, deadline_s: float) -> Outcome:
    try:
        if end.poll(max(0.0, deadline_s - time.monotonic())):
            return end.recv()
    except (EOFError, ConnectionResetError):
        pass
    return Outcome(answered=False)
