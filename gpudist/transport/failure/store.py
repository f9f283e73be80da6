"""Failure channel over torch's key-value store, for ranks that are processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from gpudist.transport.background import Background, BackgroundCall
from gpudist.transport.failure.channel import Failure, FailureChannel

# Errors that torch's stores raise when they are gone.
STORE_ERRORS = (dist.DistNetworkError, dist.DistStoreError)
_PATIENCE_S = 0.5
_POLL_S = 0.02


class StoreFailureChannel(FailureChannel):
    """Failure channel with one key for the first failure, and one per rank for its last operations.

    No method takes longer than half a second, or the given patience, even if the store hangs: a
    background thread sends the requests, over its own connection if the store can create one. After
    a request has timed out, nothing waits for the store until that request is answered. Otherwise,
    each step of a failure report would time out separately if the network is down.

    Args:
        store: any ``torch.distributed.Store``.
        prefix: prefix of the store keys, unique per world.
        host_rank: world rank whose process hosts the store and has died if the store is gone;
            ``None`` if another process hosts it.

    Attributes:
        connecting: call that completes when the store is connected. A rank waits for it before it
            joins a world: torch asks a name server for every connection, which may be slow, and no
            failure can be posted until then.
        lines_wanted: whether a rank has asked all ranks for their last operations.
    """

    def __init__(self, store: Any, prefix: str, host_rank: int | None = None) -> None:
        self._given_store: Any = store
        self._prefix = prefix
        self._host_rank = host_rank
        self._background = Background(f"gpudist failures {prefix}")
        # Connect while the store is alive: torch tries for minutes to connect to a missing one.
        self.connecting = self._background.submit(self._connect)
        self._looking: BackgroundCall[tuple[str | None, bool]] | None = None
        self._failure: Failure | None = None
        self._unanswered: BackgroundCall[object] | None = None
        self.lines_wanted = False

    @property
    def hangs(self) -> bool:
        """Whether a request has timed out and is still unanswered."""
        return self._unanswered is not None and not self._unanswered.wait(0.0)

    def post(self, failure: Failure) -> None:
        if self._failure is not None:
            return
        # An empty expected value means "unless the key is set", so that the first post wins.
        text = failure.to_json()
        job = self._background.submit(
            lambda: self._store().compare_set(self._key("failure"), "", text)
        )
        if self._wait(job):
            try:
                self._failure = Failure.from_json(job.result())
            except (RuntimeError, OSError):
                # This failure explains more than the loss of the store.
                self._failure = failure

    def peek(self) -> Failure | None:
        """Return the failure of this world, if any. Also updates :attr:`lines_wanted`."""
        if self._failure is not None:
            return self._failure
        if self._looking is None:
            self._looking = self._background.submit(self._look)
        elif not self._looking.wait(0.0):
            # The store hangs; further requests would only queue up.
            return None
        job = self._looking
        if self._wait(job):
            self._looking = None
            try:
                text, self.lines_wanted = job.result()
            except (RuntimeError, OSError) as error:
                self._failure = store_failure(self._host_rank, error)
            else:
                self._failure = Failure.from_json(text) if text is not None else None
        return self._failure

    def publish_lines(self, rank: int, lines: list[str]) -> None:
        """Publish this rank's last operations for the rank that reports a timeout."""
        self._ask(lambda: self._store().set(self._key(f"lines/{rank}"), json.dumps(lines)))

    def collect_lines(self, size: int, patience_s: float = _PATIENCE_S) -> list[list[str] | None]:
        """Ask every rank for its last operations; ``None`` for a rank that does not answer."""
        self._ask(lambda: self._store().set(self._key("lines"), "wanted"))
        lines: list[list[str] | None] = [None] * size
        deadline_s = time.monotonic() + patience_s
        while None in lines and not self.hangs and time.monotonic() < deadline_s:
            self._ask(lambda: self._read_lines(lines), deadline_s - time.monotonic())
            time.sleep(_POLL_S)
        return lines

    def leave(self, rank: int) -> None:
        """Record that the process of ``rank`` ends normally."""
        self._ask(lambda: self._store().set(self._key(f"left/{rank}"), ""))

    def has_left(self, rank: int) -> bool:
        """Return whether ``rank`` has left normally; ``False`` if the store does not answer."""
        job = self._background.submit(lambda: self._store().check([self._key(f"left/{rank}")]))
        try:
            return self._wait(job) and job.result()
        except (RuntimeError, OSError):
            return False

    def close(self) -> None:
        self._background.stop(0.0 if self.hangs else _PATIENCE_S)
        # Close the socket even if references to this channel remain.
        self._given_store = None

    def _connect(self) -> None:
        self._store()

    def _store(self) -> Any:
        # Connect in the background thread, because connecting may also block.
        return second_connection(self._given_store)

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
        # Errors stay in the job, since nothing could handle them while a failure is reported.
        self._wait(self._background.submit(call), patience_s)

    def _wait(self, job: BackgroundCall[Any], patience_s: float = _PATIENCE_S) -> bool:
        if job.wait(0.0 if self.hangs else patience_s):
            return True
        # A shorter wait does not show that the store hangs.
        if not self.hangs and patience_s >= _PATIENCE_S:
            self._unanswered = job
        return False

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"


def store_failure(host_rank: int | None, error: Exception) -> Failure:
    """Return the failure of a world whose store is gone.

    Args:
        host_rank: rank whose process hosts the store, or ``None`` if none of them does.
        error: error raised by the store.
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
        return [f"unreadable lines: {text[:80]!r}"]


# One connection per store, shared by all worlds: with a slow name server, connecting takes 5 s.
_connections: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def second_connection(store: Any) -> Any:
    """Return a second connection to ``store``, which calls that block on the first cannot delay."""
    if store not in _connections:
        try:
            _connections[store] = store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            return store
    return _connections[store]
