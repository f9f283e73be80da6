"""Start processes, send them work, and replace those that fail."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from torch import distributed as dist

from gpudist import errors
from gpudist.testing.rank_pool.outcome import Outcome, RanksFailed
from gpudist.testing.rank_pool.worker import END, carry_out, serve, watch_parent
from gpudist.world import runtime

# Time that the other ranks have to notice a failure before they are killed.
GRACE_S = 5.0
START_S = 120.0
STACKS_S = 0.3

StartMethod = Literal["forkserver", "spawn", "fork"]


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Processes on the local host that serve as the ranks of one world after another.

    Processes start when first needed and are reused, as is the world of each size. A failure ends
    its processes and all worlds, so that the next run begins clean. The pool is for test suites;
    for a single run, use :func:`gpudist.testing.run_distributed`.

    Args:
        max_size: largest number of ranks in a run.
        timeout_s: deadline of every wait between ranks, in seconds.
        start_method: ``"forkserver"`` takes 20 ms per process, with the environment that this
            program had when its first pool started the server; ``"spawn"`` takes 2 s, with the
            current environment; ``"fork"`` inherits everything this program has imported, and is
            only for programs without other threads.
    """

    def __init__(
        self,
        max_size: int = 64,
        timeout_s: float = 60.0,
        start_method: StartMethod = "forkserver",
    ) -> None:
        self.max_size = max_size
        self.timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()
        # Counts the times that all worlds have ended.
        self._generation = 0
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="gpudist-")
        self._context: Any = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            # The server imports these modules once, and forked processes inherit them.
            self._context.set_forkserver_preload(
                ["torch", "torch.distributed", "gpudist._names", "gpudist.checkpoint", __name__]
            )

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        size: int,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        limit_s: float = 60.0,
        transport: str = "gloo",
    ) -> list[Any]:
        """Run ``fn(P_world, *args, **kwargs)`` on ranks ``0 .. size - 1``; return their results.

        Worlds consist of processes: ``transport`` is ``"gloo"``, ``"host"`` or ``"nccl"``, with
        which rank ``r`` uses GPU ``r`` modulo their number.

        Raises:
            RanksFailed: if a rank raised, died, or had not ended after ``limit_s`` seconds.
            ValueError: if ``size`` is not from 1 to ``max_size``.
        """
        if not 1 <= size <= self.max_size:
            raise ValueError(
                f"a run with {size} ranks, but the pool has 1 to {self.max_size}; create a larger "
                "pool"
            )
        task = pickle.dumps((fn, tuple(args), kwargs or {}))
        try:
            workers = self._start_workers(size)
            world = self._generation, transport, size
            for rank, worker in enumerate(workers):
                worker.send((world, rank, self.timeout_s, task))
            outcomes = _collect(workers, limit_s)
            failed = [outcome for outcome in outcomes if outcome.error is not None]
            if failed:
                raise RanksFailed(size, failed)
        except BaseException:
            self._kill(size)
            raise
        if any(outcome.world_ended for outcome in outcomes):
            self._generation += 1
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """End every process; idempotent."""
        for worker in self._workers:
            worker.send(END)
        for worker in self._workers:
            worker.process.join(GRACE_S)
        self._kill(len(self._workers))
        self._folder.cleanup()

    def _start_workers(self, size: int) -> list[_Worker]:
        known = len(self._workers)
        while len(self._workers) < size:
            self._workers.append(self._launch())
        for worker in self._workers[known:]:
            worker.await_start()
        return self._workers[:size]

    def _launch(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        stack_path = Path(self._folder.name) / f"stack-{next(self._numbers)}"
        process = self._context.Process(
            target=serve,
            args=(theirs, self._store.port, str(stack_path), runtime.variables()),
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Worker(process, ours, stack_path)

    def _kill(self, size: int) -> None:
        """Kill the first ``size`` processes, which ends all worlds."""
        gone, self._workers = self._workers[:size], self._workers[size:]
        for worker in gone:
            worker.process.kill()
        for worker in gone:
            worker.process.join()
            worker.pipe.close()
        self._generation += 1


@dataclass
class _Worker:
    process: Any
    pipe: connection.Connection
    stack_path: Path

    def send(self, order: object) -> None:
        # A dead process is noticed when its answer does not arrive.
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(pickle.dumps(order))

    def await_start(self) -> None:
        """Kill the process if it does not start in time; that it has ended is found out later."""
        if not self.pipe.poll(START_S):
            self.process.kill()
        with contextlib.suppress(EOFError, ConnectionResetError):
            self.pipe.recv_bytes()

    def outcome(self, rank: int) -> Outcome | None:
        alive = self.process.is_alive()
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.pipe.poll():
                return pickle.loads(self.pipe.recv_bytes())
            if alive:
                return None
        how = self.ending()
        error = errors.PeerFailure(f"rank {rank} died: {how}", rank)
        return Outcome(rank, error=error, text=f"died: {how}")

    def ending(self) -> str:
        """Describe how the process, which has closed its end of the pipe, ended."""
        self.process.join(GRACE_S)
        code = self.process.exitcode or 0
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def timeout_outcome(self, rank: int, why: str) -> Outcome:
        text = f"{why}\n{_user_frames(self.stack_path.read_text())}"
        return Outcome(rank, error=errors.CollectiveTimeout(f"rank {rank} {text}"), text=text)


def _user_frames(dump: str) -> str:
    threads = [thread for thread in dump.split("\n\n") if watch_parent.__name__ not in thread]
    kept = [thread.partition(f" in {carry_out.__name__}")[0] for thread in threads]
    # The cut leaves the beginning of the line that contains the pool's own frame.
    stacks = [k.rpartition("\n")[0] if k != t else t for k, t in zip(kept, threads, strict=True)]
    return "\n\n".join(stacks).rstrip() or "(it left no stack)"


def _collect(workers: Sequence[_Worker], limit_s: float) -> list[Outcome]:
    """Wait for every rank to end, and report those that did not."""
    outcomes: dict[int, Outcome] = {}
    deadline = time.monotonic() + limit_s
    why = f"had not ended after {limit_s:g} s"
    healthy = True
    while len(outcomes) < len(workers):
        waiting = {rank: worker for rank, worker in enumerate(workers) if rank not in outcomes}
        signs = [sign for w in waiting.values() for sign in (w.pipe, w.process.sentinel)]
        if not connection.wait(signs, max(0.0, deadline - time.monotonic())):
            break
        for rank, worker in waiting.items():
            outcome = worker.outcome(rank)
            if outcome is None:
                continue
            outcomes[rank] = outcome
            if healthy and outcome.error is not None:
                healthy = False
                deadline = min(deadline, time.monotonic() + GRACE_S)
                why = f"had not ended {GRACE_S:g} s after rank {rank} had failed"
    stuck = {rank: worker for rank, worker in enumerate(workers) if rank not in outcomes}
    for worker in stuck.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR1)
    if stuck:
        time.sleep(STACKS_S)
    outcomes |= {rank: worker.timeout_outcome(rank, why) for rank, worker in stuck.items()}
    return [outcomes[rank] for rank in range(len(workers))]
