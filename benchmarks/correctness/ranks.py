"""Ranks of one library: ``python -m benchmarks.correctness.ranks ADAPTER FD``.

The process imports the adapter, and forks a process per rank. They run cases one after the other,
until the process at the other end of the socket FD asks for new ones.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.correctness.case import Case, Layout
from benchmarks.correctness.cases import CASES

GRACE_S = 3.0
TEXT = 300  # characters of an exception that are kept


@dataclass(frozen=True)
class About:
    """A library's version, and the commit of its source if the package says."""

    version: str
    commit: str | None


@dataclass(frozen=True)
class Result:
    """Whole tensors that a rank computed.

    Attributes:
        output: output of the module.
        input_gradient: gradient of the input; ``None`` if there was none.
        parameter_gradients: gradients of the parameters, in the module's order.
    """

    output: torch.Tensor
    input_gradient: torch.Tensor | None
    parameter_gradients: list[torch.Tensor | None]


@dataclass(frozen=True)
class Arrays:
    """A result in float64, by the name of its part."""

    parts: dict[str, np.ndarray | None]

    @classmethod
    def of(cls, result: Result) -> Arrays:
        parts = {"output": result.output, "input gradient": result.input_gradient}
        for number, gradient in enumerate(result.parameter_gradients):
            parts[f"gradient of parameter {number}"] = gradient
        return cls({name: _array(part) for name, part in parts.items()})


def _array(x: torch.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.detach().double().numpy().copy()


@dataclass(frozen=True)
class Raised:
    """Exception of a rank, as text."""

    text: str


@dataclass(frozen=True)
class NoSuchFunction:
    """The library has no function for the case."""


@dataclass(frozen=True)
class Lost:
    """A rank that died or did not answer within the limit."""

    how: str


Answer = Arrays | Raised | NoSuchFunction | Lost


class NotOffered(Exception):
    """Raised by an adapter if its library has no function for the case."""


class Adapter(Protocol):
    """Module in ``adapters``."""

    def start(self) -> About:
        """Import the library; return what it is."""
        ...

    def run(self, case: Case, layout: Layout) -> Result:
        """Run a case on this rank, in a world started by torchrun's variables."""
        ...


def whole(x: Any) -> torch.Tensor:
    """Return a distributed tensor's whole value; a plain tensor is whole."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def whole_gradient(x: torch.Tensor) -> torch.Tensor | None:
    return None if x.grad is None else whole(x.grad)


class Group:
    """Processes of one world, forked from this one, which run cases one after the other."""

    def __init__(self, adapter: Adapter, ranks: int) -> None:
        context = get_context("fork")
        port = free_port()
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (adapter, rank, ranks, port, theirs, [*self._connections, ours])
            process = context.Process(target=_rank, args=arguments)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, name: str, layout: Layout, limit_s: float) -> list[Answer]:
        """Return every rank's answer to a case of ``CASES``, after the limit at the latest."""
        answers: list[Answer] = [Lost(f"no answer within {limit_s:g} s")] * layout.ranks
        missing = {connection: rank for rank, connection in enumerate(self._connections)}
        for connection in missing:
            connection.send((name, layout))
        deadline = time.monotonic() + limit_s
        while missing and (left_s := deadline - time.monotonic()) > 0:
            for ready in wait(list(missing), left_s):
                assert isinstance(ready, Connection)
                rank = missing.pop(ready)
                answers[rank] = self._answer(rank)
                if not isinstance(answers[rank], Arrays):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def _answer(self, rank: int) -> Answer:
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionError):
            process = self._processes[rank]
            process.join()
            code = process.exitcode
            return Lost(signal.Signals(-code).name if code < 0 else f"exit status {code}")

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()


def _rank(
    adapter: Adapter, rank: int, ranks: int, port: int, orders: Connection, others: list[Connection]
) -> None:
    for other in others:
        other.close()
    be_rank(rank, ranks, port)
    with contextlib.suppress(EOFError):
        while True:
            orders.send(_run(adapter, *orders.recv()))


def be_rank(rank: int, ranks: int, port: int) -> None:
    """Set torchrun's variables."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _run(adapter: Adapter, name: str, layout: Layout) -> Answer:
    case = next(each for each in CASES if each.name == name)
    try:
        return Arrays.of(adapter.run(case, layout))
    except NotOffered:
        return NoSuchFunction()
    except Exception as error:
        text = " ".join(str(error).split())
        return Raised(f"{type(error).__name__}: {text}"[:TEXT])


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def main() -> None:
    """Serve cases to the process at the other end of a socket, until it closes the socket."""
    name, descriptor = sys.argv[1:]
    adapter: Any = importlib.import_module(name)
    connection = Connection(int(descriptor))
    torch.set_num_threads(1)
    connection.send(adapter.start())
    group: Group | None = None
    last = 0
    with contextlib.suppress(EOFError):
        while True:
            name, layout, limit_s, is_fresh = connection.recv()
            if group is None or is_fresh or layout.ranks != last:
                if group is not None:
                    group.kill()
                group, last = Group(adapter, layout.ranks), layout.ranks
            connection.send(group.run(name, layout, limit_s))
    if group is not None:
        group.kill()


if __name__ == "__main__":
    # The classes of answers have one name, here and in the process that reads them.
    from benchmarks.correctness import ranks

    ranks.main()
