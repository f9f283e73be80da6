"""The failure channel over torch's key-value store, for ranks that are processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from gpudist.transport.background import Background, Job
from gpudist.transport.failure.channel import Failure, FailureChannel

# What torch's stores raise when they are gone.
STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
_PATIENCE_S = 0.5
_POLL_S = 0.02


class StoreFailureChannel(FailureChannel):
    """A key of the store that the first failing rank sets, and one per rank for its last lines.

    No method takes longer than half a second, or the patience it is given, even when the store
    hangs: the store is asked by a thread of its own, over a connection of its own where the store
    can make one. Once a call has not been answered in time, nothing waits for the store until it
    is: behind a network that is cut, a failure would wait once for every step of its report.

    Args:
        store: any ``torch.distributed.Store``.
        prefix: first part of the keys; one per world.
        host_rank: world rank of the process that hosts the store, which is the one that died when
            the store is gone; ``None`` where another process hosts it.

    Attributes:
        connecting: complete when the store can be asked. A world is not joined before: torch asks a
            name server for every connection, and a failure could not be left while that is slow.
        lines_wanted: a rank has asked all ranks for their lines.
    """

    def __init__(self, store: Any, prefix: str, host_rank: int | None = None) -> None:
        self._given: Any = store
        self._prefix = prefix
        self._host_rank = host_rank
        self._background = Background(f"gpudist failures {prefix}")
        # While the store is there: to connect to one that is gone is tried for minutes.
        self.connecting = self._background.submit(self._connect)
        self._looking: Job[tuple[str | None, bool]] | None = None
        self._found: Failure | None = None
        self._unanswered: Job[object] | None = None
        self.lines_wanted = False

    @property
    def hangs(self) -> bool:
        """The store was given time to answer, and has not answered yet."""
        return self._unanswered is not None and not self._unanswered.wait(0.0)

    def post(self, failure: Failure) -> None:
        if self._found is not None:
            return
        # An empty expected value means "unless somebody has set it": the first post wins.
        text = failure.to_json()
        job = self._background.submit(
            lambda: self._store().compare_set(self._key("failure"), "", text)
        )
        if self._wait(job):
            try:
                self._found = Failure.from_json(job.result())
            except (RuntimeError, OSError):
                # The store is gone, which says less.
                self._found = failure

    def peek(self) -> Failure | None:
        """The failure of this world, if any; also learns whether a rank wants all ranks' lines."""
        if self._found is not None:
            return self._found
        if self._looking is None:
            self._looking = self._background.submit(self._look)
        elif not self._looking.wait(0.0):
            # The store hangs; asking again would only queue up.
            return None
        job = self._looking
        if self._wait(job):
            self._looking = None
            try:
                text, self.lines_wanted = job.result()
            except (RuntimeError, OSError) as error:
                self._found = store_gone(self._host_rank, error)
            else:
                self._found = Failure.from_json(text) if text is not None else None
        return self._found

    def publish_lines(self, rank: int, lines: list[str]) -> None:
        """Leave this rank's flight recorder for the rank that writes the report of a timeout."""
        self._ask(lambda: self._store().set(self._key(f"lines/{rank}"), json.dumps(lines)))

    def collect_lines(self, size: int, patience_s: float = _PATIENCE_S) -> list[list[str] | None]:
        """Ask every rank for its lines; ``None`` for a rank that has not answered in time."""
        self._ask(lambda: self._store().set(self._key("lines"), "wanted"))
        lines: list[list[str] | None] = [None] * size
        deadline_s = time.monotonic() + patience_s
        while None in lines and not self.hangs and time.monotonic() < deadline_s:
            self._ask(lambda: self._read_lines(lines), deadline_s - time.monotonic())
            time.sleep(_POLL_S)
        return lines

    def leave(self, rank: int) -> None:
        """Say that the process of ``rank`` ends because it has nothing more to do."""
        self._ask(lambda: self._store().set(self._key(f"left/{rank}"), ""))

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has said so; false as well where the store does not answer."""
        job = self._background.submit(lambda: self._store().check([self._key(f"left/{rank}")]))
        try:
            return self._wait(job) and job.result()
        except (RuntimeError, OSError):
            return False

    def close(self) -> None:
        self._background.stop(0.0 if self.hangs else _PATIENCE_S)
        # Its socket goes with it, however long somebody holds this.
        self._given = None

    def _connect(self) -> None:
        self._store()

    def _store(self) -> Any:
        """In the thread alone: also to connect takes as long as the store likes."""
        return own_connection(self._given)

    def _look(self) -> tuple[str | None, bool]:
        key = self._key("failure")
        text = (
            self._store().get(key).decode(errors="replace") if self._store().check([key]) else None
        )
        return text, self._store().check([self._key("lines")])

    def _read_lines(self, lines: list[list[str] | None]) -> None:
        for rank, known in enumerate(lines):
            key = self._key(f"lines/{rank}")
            if known is None and self._store().check([key]):
                lines[rank] = _lines_of(self._store().get(key))

    def _ask(self, call: Callable[[], object], patience_s: float = _PATIENCE_S) -> None:
        # Errors stay in the job: who reports a failure has nobody left to tell.
        self._wait(self._background.submit(call), patience_s)

    def _wait(self, job: Job[Any], patience_s: float = _PATIENCE_S) -> bool:
        """Whether the store has answered."""
        if job.wait(0.0 if self.hangs else patience_s):
            return True
        # Less patience says nothing about the store.
        if not self.hangs and patience_s >= _PATIENCE_S:
            self._unanswered = job
        return False

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def store_gone(host_rank: int | None, error: Exception) -> Failure:
    """The failure of a world whose store does not answer any more.

    Args:
        host_rank: the rank whose process hosts it, where it is one of them.
    """
    ended = (
        "its host has ended, torchrun's agent where that serves it"
        if host_rank is None
        else f"rank {host_rank}, its host, has ended"
    )
    return Failure("PeerFailure", host_rank, f"the store of this world is gone: {ended} ({error})")


def _lines_of(text: bytes) -> list[str]:
    try:
        return [str(line) for line in json.loads(text)]
    except (ValueError, TypeError, RecursionError):
        return [f"what cannot be read: {text[:80]!r}"]


# One per store, however many worlds use it: with a slow name server a connection takes 5 s.
_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def own_connection(store: Any) -> Any:
    """Another connection to ``store``, for a call that blocks on the first to hold up no other."""
    if store not in _connections:
        try:
            _connections[store] = store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            return store
    return _connections[store]
