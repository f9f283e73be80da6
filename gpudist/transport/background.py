"""Background thread for calls that block and cannot be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S = 0.5


class BackgroundCall(Generic[T]):
    """Call that runs in a background thread."""

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
        # Free the call here instead of when the job is dropped: freeing a tensor releases the GIL,
        # and a thread that reacquires it during interpreter shutdown aborts the process.
        del self._call
        self._done.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` and return whether the call is done; signals end the wait."""
        return self._done.wait(timeout_s)

    def has_raised(self, kind: type[BaseException]) -> bool:
        """Return whether the call raised this kind of error; only after ``wait`` was true."""
        return isinstance(self._error, kind)

    def result(self) -> T:
        """Return the result of the call or raise its error; only after ``wait`` was true."""
        if self._error is not None:
            raise self._error
        return self._value[0]


class Background:
    """Daemon thread, started at first use, that runs calls in the order of submission.

    A ``ThreadPoolExecutor`` is not suitable: the interpreter joins its threads at exit, so a call
    that never returns would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[BackgroundCall | None] = SimpleQueue()
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
        job = BackgroundCall(call)
        self._jobs.put(job)
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


def _serve(jobs: SimpleQueue[BackgroundCall | None]) -> None:
    # This is not a method, because a reference to the owner would keep it alive forever.
    while (job := jobs.get()) is not None:
        job.run()
