"""Requests to a store, with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpudist.errors import CollectiveTimeout
from gpudist.transport.background import Background, BackgroundCall
from gpudist.transport.failure.deadlines import deadline_text

T = TypeVar("T")

# Shortest wait for a request made just before the deadline.
_PATIENCE_S = 0.1


class StoreAsker:
    """Runner of store requests in a thread, because a store with a stopped host never answers.

    Args:
        doing: name of the current operation in error messages.
        rank: world rank of this process.
        timeout_s: deadline of all requests together, in seconds.
        store_rank: rank whose process hosts the store, or ``None`` if none of them does.
    """

    def __init__(self, doing: str, rank: int, timeout_s: float, store_rank: int | None) -> None:
        self.deadline_s = time.monotonic() + timeout_s
        self._doing = doing
        self._rank = rank
        self._timeout_s = timeout_s
        self._store_rank = store_rank
        self._background = Background(f"gpudist asks for rank {rank}")

    def submit(self, call: Callable[[], T]) -> BackgroundCall[T]:
        """Start a request without waiting for it."""
        return self._background.submit(call)

    def __call__(self, call: Callable[[], T]) -> T:
        """Run a request and return its result.

        Raises:
            CollectiveTimeout: the store did not answer before the deadline.
        """
        job = self.submit(call)
        if not job.wait(max(_PATIENCE_S, self.deadline_s - time.monotonic())):
            host = "" if self._store_rank is None else f", rank {self._store_rank},"
            raise CollectiveTimeout(
                f"{deadline_text(self._doing, self._rank, self._timeout_s)}: the store of this "
                f"world does not answer; its host{host} is stopped or cannot be reached"
            )
        return job.result()

    def close(self) -> None:
        self._background.stop(0.0)
