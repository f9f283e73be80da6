"""The loop of every rank of every world: wait for an order, execute it, answer.

A rank that is not taking its turn sleeps in a read from a socket. Ranks without torch import this.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

from benchmarks.case import Case, Side
from benchmarks.resident import forget_peak, own_mib, own_peak_mib

Prepare = Callable[[Case], Mapping[str, Side]]


@dataclass(frozen=True)
class Hello:
    """A rank's first message: its number, its process, and the versions of its software."""

    rank: int
    pid: int
    versions: dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One rank's part of a turn: microseconds a call, by iteration, and the new pages it took."""

    us: list[float]
    new_pages: int


class _Rank:
    """Executor of orders; each method is one order."""

    def __init__(
        self, barrier: Callable[[], object], prepare: Prepare, begin: Callable[[str], object]
    ) -> None:
        self._barrier = barrier
        self._prepare = prepare
        self._begin = begin
        self._sides: Mapping[str, Side] = {}
        self._before_mib = 0.0

    def prepare(self, case: Case) -> list[str]:
        """Build this world's sides of ``case``, replacing the previous ones; return their names."""
        self._sides = {}
        self._before_mib = own_mib()
        self._sides = self._prepare(case)
        return list(self._sides)

    def check(self, name: str) -> bool:
        side = self._sides[name]
        side.clear()
        self._barrier()
        return bool(side.is_right(side.call()))

    def peak(self, name: str) -> float:
        """Return the peak of a call after an earlier one, in MiB above the memory before the case.

        It includes what the side keeps, such as parameters and buffers of messages, but no pages of
        files.
        """
        call = self._sides[name].call
        call()
        self._barrier()
        forget_peak()
        call()
        return own_peak_mib() - self._before_mib

    def time(self, name: str, calls: int, iterations: int) -> Turn:
        """Time ``iterations``, each started together, after an untimed call."""
        call = self._sides[name].call
        self._begin(name)
        us: list[float] = []
        gc.disable()
        self._barrier()
        call()
        pages = _pages()
        for _ in range(iterations):
            self._barrier()
            start_ns = time.perf_counter_ns()
            for _ in range(calls):
                call()
            us.append((time.perf_counter_ns() - start_ns) / 1e3 / calls)
        pages = _pages() - pages
        gc.enable()
        return Turn(us, pages)


def serve(
    address: str,
    rank: int,
    versions: dict[str, str],
    barrier: Callable[[], object],
    prepare: Prepare,
    begin: Callable[[str], object] = lambda name: None,
) -> None:
    """Serve the controller at ``address`` until it sends the last order or disconnects.

    ``begin`` is called with the name of a side before its turn.
    """
    connection = Client(address, family="AF_UNIX")
    connection.send(Hello(rank, os.getpid(), versions))
    orders = _Rank(barrier, prepare, begin)
    while True:
        try:
            verb, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        if verb == "end":
            return
        answer: Any = getattr(orders, verb)(*arguments)
        connection.send(answer)


def _pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
