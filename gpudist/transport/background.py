"""One thread for calls that block and cannot be interrupted, so that no rank makes them itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.5


class Job(Generic[T]):
    """A call made in another thread."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._done = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error = error
        # Here, and not when the job is dropped: to free a tensor lets go of the interpreter, and a
        # thread that wants it back while the process exits ends the process with an abort.
        del self._call
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether the call has returned, after at most ``timeout_s``; a signal ends the wait."""
        return self._done.wait(timeout_s)

    def failed_with(self, kind: type[BaseException]) -> bool:
        """Whether the call raised an error of this kind; only after ``wait`` was true."""
        return isinstance(self._error, kind)

    def result(self) -> T:
        """What the call returned, or raise what it raised; only after ``wait`` was true."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class Background:
    """A daemon thread, started at first use, that makes calls in the order they are submitted.

    It is a daemon, and not an executor's, since the interpreter joins those at exit and a call
    that never returns would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread now: Python makes none any more once it has begun to exit."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()

    def submit(self, call: Callable[[], T]) -> Job[T]:
        self.start()
        job = Job(call)
        self._jobs.put(job)
        return job

    def stop(self, patience_s: float = _PATIENCE_S) -> bool:
        """End the thread once it has made the calls already submitted; wait for it, but briefly.

        Returns:
            Whether no call is under way any more.
        """
        self._jobs.put(None)
        if self._thread is None:
            return True
        if self._thread is threading.current_thread():
            return False
        self._thread.join(patience_s)
        return not self._thread.is_alive()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    # Not a method: a thread that held its owner would keep it from ever being collected.
    while (job := jobs.get()) is not None:
        job.run()
