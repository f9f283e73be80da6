"""Loopback transport: ranks are threads of one process, with deterministic execution."""

from __future__ import annotations

import atexit
import ctypes
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakMethod

import torch
from torch._guards import TracingContext
from torch.autograd import forward_ad

from gpudist import errors
from gpudist.transport.cooperative import Turns
from gpudist.transport.failure.channel import Failure
from gpudist.transport.host.core_transport import CoreTransport
from gpudist.transport.message_header import MessageHeader

T = TypeVar("T")

_INTERRUPT_PATIENCE_S = 1.0
_SLICE_S = 0.1
# Messages of a rank that the report of a deadlock names.
_SHOWN = 4


class _World:
    """State shared by the ranks of one run. It needs no locks: one thread runs at a time."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.turns = Turns(size, self._deadlock)
        self.transports = [LoopbackTransport(self.turns, r, size, timeout_s) for r in range(size)]
        for wire in self.transports:
            wire.meet(self.transports)
        # First failure; the ranks forget it when they close.
        self.failure: Failure | None = None

    def fail(self, failure: Failure) -> None:
        for wire in self.transports:
            wire.failures.post(failure)

    def _deadlock(self) -> None:
        finished = self.turns.finished
        reports: list[str] = []
        meant: set[bytes] = set()
        for wire in self.transports:
            waits = {} if finished[wire.rank] else wire.waits()
            meant.update(waits.values())
            reports.append(f"  rank {wire.rank} {wire.report(list(waits))}")
        kind, why = "CollectiveTimeout", "deadlock"
        if len(meant) > 1 and not any(finished):
            # If all ranks agreed on the order of operations, the first unfinished operation could
            # run.
            kind, why = "PlanMismatch", "ranks disagree about what they do"
        text = f"{why}: every rank waits or has finished, and no message can be delivered:\n"
        reports.append(
            "every rank must call the same operations in the same order, and none under a "
            "condition that only some ranks meet, such as rank == 0"
        )
        self.fail(Failure(kind, None, text + "\n".join(reports)))


class LoopbackTransport(CoreTransport):
    """One rank of a ``LoopbackWorld``.

    Raises:
        NotBuiltError: this installation has no native core.
    """

    name = "loopback"
    connects = "threads of one process"

    def __init__(self, turns: Turns, rank: int, size: int, timeout_s: float) -> None:
        # Python's garbage collector does not see what the core refers to.
        rest = WeakMethod(self._rest)
        super().__init__(rank, size, timeout_s, rest=lambda: rest()())  # pyright: ignore[reportOptionalCall]
        self._turns = turns

    @classmethod
    def single(cls, timeout_s: float = 300.0) -> LoopbackTransport:
        """Return the transport of a world whose only rank is the calling thread."""
        return _World(1, timeout_s).transports[0]

    def meet(self, transports: Sequence[LoopbackTransport]) -> None:
        """Connect this rank with those of ``transports``, by rank."""
        self._core.connect([wire._core.address() for wire in transports])

    def waits(self) -> dict[str, bytes]:
        """Return a description of each message that this rank waits for, and its digest."""
        return {
            f"rank {peer} to {'receive' if sends else 'send'} "
            f"{MessageHeader(number, nbytes, digest, label).words()}": digest
            for sends, peer, number, nbytes, digest, label in self._core.unfinished()
        }

    def report(self, waits: Sequence[str]) -> str:
        """Describe what this rank is doing, for the report of a deadlock."""
        if self._turns.finished[self.rank]:
            return "has finished"
        more = f" and {len(waits) - _SHOWN} more messages" if len(waits) > _SHOWN else ""
        operations = "; ".join(self.recorder.lines())
        return f"waits for {', '.join(waits[:_SHOWN])}{more}; its last operations: {operations}"

    def _rest(self) -> None:
        if TracingContext.try_get() is not None:
            raise errors.TransportError(
                f"rank {self.rank} would wait for other threads while torch.compile allows only "
                "one to compile: agree on the shapes first, by a call that is not compiled or "
                "with global_shape="
            )
        if forward_ad._current_level >= 0:  # pyright: ignore
            raise errors.TransportError(
                f"rank {self.rank} would wait for other threads within torch.func.jvp or "
                "torch.autograd.forward_ad, whose levels belong to the process; run the ranks as "
                "processes: transport='host'"
            )
        self._turns.wait(self.rank, self._core.may_go_on)


class LoopbackWorld:
    """World of ``size`` ranks that are threads of this process and run one at a time.

    A rank runs until it waits for a message. A program therefore behaves the same in every run, and
    a deadlock is detected immediately, as ``CollectiveTimeout`` on every waiting rank. Each rank
    has its own state of torch's default random generator; all start from the caller's state.

    Args:
        size: number of ranks.
        timeout_s: deadline of every group, in seconds.
    """

    def __init__(self, size: int, timeout_s: float = 300.0) -> None:
        if size < 1:
            raise errors.TransportError(f"a world has at least one rank, not {size}")
        self.size = size
        self.timeout_s = timeout_s

    def run(self, body: Callable[[LoopbackTransport], T], limit_s: float = math.inf) -> list[T]:
        """Call ``body(wire)`` on every rank and return the results, in rank order.

        Args:
            body: function to call.
            limit_s: time that the ranks may take, in seconds; a rank that never waits has no other
                deadline.

        Raises:
            CollectiveTimeout: a rank had not ended in time; shows the stacks of all threads.
            BaseException: error of the lowest rank that did not merely report the failure of
                another, with a note that names the rank.
        """
        world = _World(self.size, self.timeout_s)
        outcomes: list[Future[T]] = [Future() for _ in range(self.size)]
        threads = [
            threading.Thread(
                target=_run_rank,
                args=(world, wire, body, outcomes[wire.rank]),
                name=f"gpudist loopback rank {wire.rank}",
                daemon=True,
            )
            for wire in world.transports
        ]
        generator_state = torch.get_rng_state()
        strangers, deadline_s = set(threading.enumerate()), time.monotonic() + limit_s
        for thread in threads:
            thread.start()
        try:
            world.turns.start()
            # Wait in slices: a signal handled in another thread does not end a wait here.
            while not world.turns.all_finished.wait(_SLICE_S):
                if time.monotonic() > deadline_s:
                    raise errors.CollectiveTimeout(
                        f"{self.size} loopback ranks had not ended after {limit_s:g} s\n"
                        f"{_stacks(set(threading.enumerate()) - strangers)}"
                    )
        except BaseException as error:
            world.fail(Failure("PeerFailure", None, f"{type(error).__name__} in the caller"))
            if not world.turns.all_finished.wait(_INTERRUPT_PATIENCE_S):
                _interrupt(threads)
            raise
        finally:
            torch.set_rng_state(generator_state)
        _raise_cause(outcomes, world.failure)
        return [outcome.result() for outcome in outcomes]


def _run_rank(
    world: _World,
    wire: LoopbackTransport,
    body: Callable[[LoopbackTransport], Any],
    outcome: Future[Any],
) -> None:
    try:
        world.turns.enter(wire.rank)
        outcome.set_result(body(wire))
    except BaseException as error:
        outcome.set_exception(error)
        wire.abort(Failure.from_exception(error, wire.rank))
    finally:
        world.failure = world.failure or wire.failures.peek()
        try:
            wire.close()
            # Cached plans of other worlds hold a reference to this rank; free its operators.
            wire.remembered.clear()
        finally:
            world.turns.finish(wire.rank)


class _Parked(BaseException):
    """Error that holds the thread in which it is raised, because programs may catch any error."""

    def __init__(self) -> None:
        threading.Event().wait()


def _interrupt(threads: Sequence[threading.Thread]) -> None:
    # An error that is raised in another thread takes effect once that executes Python code. In an
    # import it would leave half a module for the whole process; such a thread ends when it waits.
    frames = sys._current_frames()
    _raise_in([t for t in threads if not _imports(frames.get(t.ident or 0))], SystemExit)
    # A daemon thread that returns from torch while the interpreter shuts down aborts the process.
    atexit.register(_raise_in, threads, _Parked)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None


def _raise_in(threads: Sequence[threading.Thread], kind: type[BaseException]) -> None:
    for thread in threads:
        if thread.is_alive() and thread.ident is not None:
            identifier, error = ctypes.c_ulong(thread.ident), ctypes.py_object(kind)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, error)
    deadline_s = time.monotonic() + _INTERRUPT_PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))


def _stacks(threads: Iterable[threading.Thread]) -> str:
    frames = sys._current_frames()
    return "\n".join(
        f"{thread.name}:\n" + "".join(traceback.format_stack(frames[thread.ident]))
        for thread in sorted(threads, key=lambda thread: thread.name)
        if thread.ident in frames
    )


def _raise_cause(outcomes: Sequence[Future[Any]], failure: Failure | None) -> None:
    raised = {rank: error for rank, o in enumerate(outcomes) if (error := o.exception())}
    if not raised:
        return
    causes = [rank for rank, error in raised.items() if not _is_echo(error, failure)]
    if causes:
        rank = min(causes)
    elif failure is not None and failure.rank in raised:
        rank = failure.rank
    else:
        rank = min(raised)
    raise _add_note(raised[rank], f"raised on rank {rank} of a loopback world of {len(outcomes)}")


def _is_echo(error: BaseException | None, failure: Failure | None) -> bool:
    while error is not None and failure is not None:
        if isinstance(error, errors.GpudistError) and failure.message in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _add_note(error: BaseException, note: str) -> BaseException:
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(note)
    elif error.args and isinstance(error.args[0], str):
        # Python 3.10 does not show notes.
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error
