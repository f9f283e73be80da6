"""Cooperative threads: one runs at a time and yields only where it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Turns:
    """Scheduler that lets ``size`` threads run one at a time.

    The order of execution depends on the program alone, so every run is identical, and a deadlock
    is detected immediately. Each thread has its own state of torch's default random generator,
    swapped at each switch; all start from the state at construction.

    Args:
        size: number of threads.
        on_deadlock: called when every thread waits or has finished; must make a wait ready.
    """

    def __init__(self, size: int, on_deadlock: Callable[[], None]) -> None:
        self._on_deadlock = on_deadlock
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        # Condition that each thread waits for; None if it is running or runnable.
        self._ready: list[Callable[[], bool] | None] = [None] * size
        self._generator_states = [torch.get_rng_state()] * size
        self.finished = [False] * size
        self.all_finished = threading.Event()

    def start(self) -> None:
        """Let the first thread run. Called once, by the owner."""
        self._turn[0].release()

    def enter(self, rank: int) -> None:
        """Wait for the first turn. Called first by each thread."""
        self._turn[rank].acquire()
        torch.set_rng_state(self._generator_states[rank])

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let other threads run until ``ready()`` is true."""
        if ready():
            return
        self._ready[rank] = ready
        self._generator_states[rank] = torch.get_rng_state()
        following = self._following(rank)
        if following != rank:
            self._turn[following].release()
            self._turn[rank].acquire()
            torch.set_rng_state(self._generator_states[rank])
        self._ready[rank] = None

    def finish(self, rank: int) -> None:
        """End this thread's turns. Called last by each thread."""
        self.finished[rank] = True
        if all(self.finished):
            self.all_finished.set()
        else:
            self._turn[self._following(rank)].release()

    def _following(self, rank: int) -> int:
        size = len(self._turn)
        while True:
            for step in range(1, size + 1):
                candidate = (rank + step) % size
                ready = self._ready[candidate]
                if not self.finished[candidate] and (ready is None or ready()):
                    return candidate
            self._on_deadlock()
