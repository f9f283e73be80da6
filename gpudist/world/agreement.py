"""Check at connection time that every rank is one process, with the same version and options."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any, NamedTuple

from gpudist.errors import GpudistError, TransportError, side_by_side
from gpudist.transport.background import BackgroundCall
from gpudist.transport.failure.asker import StoreAsker
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.store import STORE_ERRORS

_LOOK_EVERY_S = 0.5
# The store answers requests of roughly ten thousand ranks per second.
_RANKS_PER_LOOK = 1000
_COMPLETE = "complete"


class Outsider(TransportError):
    """The world that meets in the store is complete without this process, which alone raises."""


class _Process(NamedTuple):
    """Process that has arrived in the store."""

    rank: int
    size: int
    process: str
    said: str


class WorldAgreement:
    """Arrivals of processes in the rendezvous store, and one verdict about them for all ranks.

    The first process whose description differs, or whose rank another process already has, makes
    the verdict a refusal, which every rank raises. Once all ranks are connected, the first of them
    makes the verdict "complete", and a process that arrives later raises alone.

    Args:
        ask: runs a store request with a deadline.
        store: any ``torch.distributed.Store``.
        prefix: prefix of the store keys, unique per world.
        rank, size: rank of this process and number of ranks.
    """

    def __init__(self, ask: StoreAsker, store: Any, prefix: str, rank: int, size: int) -> None:
        self._ask = ask
        self._store: Any = store
        self._rank = rank
        self._size = size
        self._looking: BackgroundCall[None] | None = None
        self._looked_s = time.monotonic()
        self._key = f"{prefix}/said"
        self._verdict = f"{self._key}/verdict"

    def say(self, said: str) -> None:
        """Publish the text that must be equal on all ranks. Call once, before the others.

        Raises:
            PlanMismatch: this process and an earlier one disagree about the text or the size.
            TransportError: another process has this rank.
            Outsider: the world is complete without this process.
        """
        process = f"process {os.getpid()} on {socket.gethostname()}"
        mine = _Process(self._rank, self._size, process, said)

        def arrive() -> None:
            store, key = self._store, self._key
            # The entry precedes the comparisons, so that whoever finds a difference can read it.
            store.set(f"{key}/{store.add(f'{key}/count', 1)}", json.dumps(mine))
            alike = f"{mine.size} {mine.said}"
            is_alike = store.compare_set(f"{key}/first", "", alike).decode() == alike
            if store.add(f"{key}/of/{mine.rank}", 1) > 1 or not is_alike:
                self._refuse(store, mine)

        self._ask(arrive)

    def compare(self, store: Any) -> None:
        """Raise if a process was refused.

        Raises:
            PlanMismatch: ranks disagree; lists the texts of those that had arrived.
            TransportError: two processes have the same rank.
        """
        if store.check([self._verdict]):
            _require_complete(store.get(self._verdict))

    def complete(self) -> None:
        """Close the world: call when all ranks are connected.

        Raises:
            GpudistError: see :meth:`compare`.
        """
        store = self._store
        # If the store is gone by now, the first operation reports which rank died.
        with suppress(*STORE_ERRORS):
            _require_complete(self._ask(lambda: store.compare_set(self._verdict, "", _COMPLETE)))

    def look(self) -> None:
        """Compare periodically while waiting for other ranks. Never blocks.

        Raises:
            GpudistError: see :meth:`compare`.
        """
        if self._looking is not None and self._looking.wait(0.0):
            job, self._looking = self._looking, None
            if isinstance(job.exception(), GpudistError):
                job.result()
        if self._store is None:
            return
        due_s = self._looked_s + max(_LOOK_EVERY_S, self._size / _RANKS_PER_LOOK)
        if self._looking is None and time.monotonic() > due_s:
            self._looked_s = time.monotonic()
            store = self._store
            self._looking = self._ask.submit(lambda: self.compare(store))

    def close(self) -> None:
        """Stop comparing and release the store."""
        self._store = self._looking = None

    def _refuse(self, store: Any, mine: _Process) -> None:
        arrivals = self._arrivals(store)
        failure = _failure_of(mine, arrivals)
        verdict = store.compare_set(self._verdict, "", failure.to_json())
        if verdict == _COMPLETE.encode():
            raise Outsider(_words_for_outsider(mine, arrivals))
        _require_complete(verdict)

    def _arrivals(self, store: Any) -> list[_Process]:
        numbers = range(1, store.add(f"{self._key}/count", 0) + 1)
        keys = [f"{self._key}/{number}" for number in numbers]
        entries = [_process_of(store.get(key)) for key in keys if store.check([key])]
        return [arrival for arrival in entries if arrival is not None]


def _require_complete(verdict: bytes) -> None:
    if verdict != _COMPLETE.encode():
        raise Failure.from_json(verdict).to_exception()


def _process_of(text: bytes) -> _Process | None:
    try:
        rank, size, process, said = json.loads(text)
        return _Process(int(rank), int(size), str(process), str(said))
    except (ValueError, TypeError, RecursionError):
        return None


def _failure_of(mine: _Process, arrivals: list[_Process]) -> Failure:
    """Return the failure of a world in which processes disagree or share this process's rank."""
    sizes, said = ({arrival[place] for arrival in arrivals} for place in (1, 3))
    if len(sizes) == len(said) == 1:
        same = [arrival.process for arrival in arrivals if arrival.rank == mine.rank]
        return Failure(
            "TransportError",
            None,
            f"{len(same)} processes are rank {mine.rank} of {mine.size}: {', '.join(same)}; end "
            "the one that does not belong to this job, such as a worker of an earlier job or of a "
            "script that was started twice, and start the job again",
        )
    views: dict[int, str] = {}
    for rank, size, process, text in arrivals:
        view = text if len(sizes) == 1 else f"{text}, one of {size} ranks, {process}"
        views[rank] = f"{views[rank]}; {view}" if rank in views else view
    return Failure(
        "PlanMismatch",
        None,
        f"ranks disagree about what they run:{side_by_side(views)}\n"
        "install the same gpudist on every node, and start every rank with the same variables and "
        "arguments of init()",
    )


def _words_for_outsider(mine: _Process, arrivals: list[_Process]) -> str:
    member = min(arrivals, key=lambda process: (process == mine, process.rank != mine.rank))
    return (
        f"{mine.process} would be rank {mine.rank} of {mine.size}, but the world at this address "
        f"is complete: its rank {member.rank} of {member.size} is {member.process}. If a program "
        "starts this process by 'spawn', call gpudist.init() only under if __name__ == "
        "'__main__'; if another job uses this address, end it or set another MASTER_PORT"
    )
