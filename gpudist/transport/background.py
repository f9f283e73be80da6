"""Background thread for calls that block and cannot be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.5


class BackgroundCall(Future[T]):
    """Call that runs in a background thread."""

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` and return whether the call is done; signals end the wait."""
        return bool(wait([self], timeout_s).done)


class Background:
    """Daemon thread, started at first use, that runs calls in the order of submission.

    A ``ThreadPoolExecutor`` is not suitable: the interpreter joins its threads at exit, so a call
    that never returns would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread now, because Python cannot start threads during interpreter shutdown."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()

    def submit(self, call: Callable[[], T]) -> BackgroundCall[T]:
        self.start()
        job = BackgroundCall[T]()
        self._jobs.put((job, [call]))
        return job

    def stop(self, patience_s: float = _PATIENCE_S) -> bool:
        """End the thread after the calls already submitted; wait at most ``patience_s``.

        Returns:
            Whether the thread has ended, so that no call is running.
        """
        self._jobs.put(None)
        if self._thread is None:
            return True
        if self._thread is threading.current_thread():
            return False
        self._thread.join(patience_s)
        return not self._thread.is_alive()


def _serve(jobs: SimpleQueue[Any]) -> None:
    # This is not a method, because a reference to the owner would keep it alive forever.
    while (entry := jobs.get()) is not None:
        job, calls = entry
        try:
            # Free the call here instead of when the entry is dropped: freeing a tensor releases the
            # GIL, and a thread that reacquires it during interpreter shutdown aborts the process.
            job.set_result(calls.pop()())
        except BaseException as error:
            job.set_exception(error)
