"""Thread that connects the native watchdog to the failure channel of the world."""

from __future__ import annotations

import threading
import time
from typing import Any

from gpudist.errors import TransportError
from gpudist.transport.failure.channel import Failure
from gpudist.transport.failure.deadlines import deadline_text, last_operations
from gpudist.transport.failure.store import StoreFailureChannel
from gpudist.transport.flight_recorder import FlightRecorder
from gpudist.transport.host.processes import has_ended

_PERIOD_S = 0.02
# With no operation in flight, nobody waits: a world at rest costs next to nothing.
_PERIOD_AT_REST_S = 0.2
_GRACE_S = 0.5
# Poll for failures once an operation has taken this long; most take microseconds.
_SUSPICIOUS_S = 0.2
_LOOK_EVERY_S = 0.2
# The store answers requests of roughly ten thousand ranks per second.
_RANKS_PER_LOOK = 1000


class DeviceRecorder(FlightRecorder):
    """Flight recorder whose entries the native core keeps, with their completion on the GPU."""

    def __init__(self, core: Any) -> None:
        super().__init__()
        self._core = core

    def lines(self, last: int = 5) -> list[str]:
        return self._core.lines(last)


class NcclWatch:
    """Watcher that posts failures of this rank, polls those of others, and fails the world.

    Args:
        core: native world.
        channel: failure channel of the world.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every operation, in seconds.
    """

    def __init__(
        self, core: Any, channel: StoreFailureChannel, rank: int, size: int, timeout_s: float
    ) -> None:
        self._core = core
        self._channel = channel
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._look_every_s = max(_LOOK_EVERY_S, min(1.0, size / _RANKS_PER_LOOK))
        self._looked_s = 0.0
        self._pids: dict[int, int] = {}
        self._lock = threading.Lock()
        self._store_is_gone = False
        self._stop = threading.Event()
        # This is a daemon that polls, because nothing would end a blocking wait at exit.
        self._thread = threading.Thread(
            target=self._watch, name=f"gpudist nccl watch {rank}", daemon=True
        )
        self._thread.start()

    def fail(self, failure: Failure) -> None:
        """Post ``failure`` unless another was posted first, and fail the world with the first."""
        with self._lock:
            self._channel.post(failure)
            first = self._channel.peek()
        # This failure explains more than the loss of the store.
        self._core.fail((failure if first is None or _is_store_gone(first) else first).to_json())

    def watch_process(self, rank: int, pid: int) -> None:
        """Watch the process of another rank and report its end."""
        self._pids[rank] = pid
        self._core.watch_process(rank, pid)

    def await_death(self, error: BaseException) -> None:
        """Wait briefly for the report of a peer's death that may have caused NCCL's ``error``."""
        if type(error) is not TransportError:
            return
        # A process that is ending releases its memory before it has ended.
        time.sleep(_PERIOD_S)
        deadline_s = time.monotonic() + _GRACE_S
        while not self._core.failure() and time.monotonic() < deadline_s:
            if not any(map(has_ended, self._pids.values())):
                return
            time.sleep(_PERIOD_S)

    def look(self) -> None:
        """Fail the world if another rank has posted a failure, with rate-limited store requests."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked_s < self._look_every_s:
                return
            self._looked_s = now
            failure = self._channel.peek()
            if self._channel.lines_wanted:
                self._channel.publish_lines(self._rank, self._core.lines(5))
            if failure is not None and _is_store_gone(failure) and not self._store_is_gone:
                # The store's host may be a rank whose death will be reported soon.
                self._store_is_gone = True
                return
        if failure is not None:
            self._core.fail(failure.to_json())

    def leave(self) -> None:
        """Report to the other ranks that this one leaves normally."""
        lines = [*self._core.lines(4), "it has left the world"]
        self._channel.publish_lines(self._rank, lines)
        self._channel.leave(self._rank)

    def stop(self) -> None:
        """End the thread, so that it no longer uses the native core."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self) -> None:
        rests = False
        while not self._stop.wait(_PERIOD_AT_REST_S if rests else _PERIOD_S):
            rests = self._core.oldest_s() == 0.0
            if self._core.failure():
                continue
            report = self._core.next_problem()
            failure = self._failure_of(*report) if report is not None else None
            if failure is not None:
                self.fail(failure)
            elif self._core.oldest_s() > _SUSPICIOUS_S:
                self.look()

    def _failure_of(self, kind: str, text: str, rank: int) -> Failure | None:
        if kind == "ended":
            return self._death_of(rank)
        if kind == "broken":
            # A peer's death breaks the connection; a rank on its node may have posted it already.
            with self._lock:
                known = self._channel.peek()
            message = f"NCCL on rank {self._rank}: {text}"
            return known or Failure("TransportError", self._rank, message)
        return self._timeout_failure(text)

    def _death_of(self, rank: int) -> Failure | None:
        if self._channel.has_left(rank):
            return None
        return Failure("PeerFailure", rank, f"the process of rank {rank} has ended")

    def _timeout_failure(self, label: str) -> Failure:
        self._channel.publish_lines(self._rank, self._core.lines(5))
        text = deadline_text(label, self._rank, self._timeout_s)
        everyones = self._channel.collect_lines(self._size)
        return Failure(
            "CollectiveTimeout", None, f"{text}; {last_operations(everyones, self._pids)}"
        )


def _is_store_gone(failure: Failure) -> bool:
    return failure.kind == "PeerFailure" and failure.rank is None
