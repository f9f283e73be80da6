"""Loopback transport: ranks are threads of one process, with deterministic execution."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch._guards import TracingContext

from gpudist import errors
from gpudist.transport.cooperative import Turns
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.message_header import MessageHeader
from gpudist.transport.point_to_point import PointToPointTransport

T = TypeVar("T")

_INTERRUPT_PATIENCE_S = 1.0
_SLICE_S = 0.1


class LoopbackFailureChannel(FailureChannel):
    """Failure channel of ranks that share a process."""

    def __init__(self) -> None:
        self._failure: Failure | None = None

    def post(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure = failure

    def peek(self) -> Failure | None:
        return self._failure


@dataclass(eq=False)
class _LoopbackMessage:
    """One side of a message; the other side may not have been posted yet."""

    payload: torch.Tensor
    header: MessageHeader
    words: str
    done: bool = False


class _World:
    """State shared by the ranks of one run. It needs no locks: one thread runs at a time."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.failures = LoopbackFailureChannel()
        self.turns = Turns(size, self._deadlock)
        self.sends: defaultdict[tuple[int, int], deque[_LoopbackMessage]] = defaultdict(deque)
        self.recvs: defaultdict[tuple[int, int], deque[_LoopbackMessage]] = defaultdict(deque)
        self.transports = [LoopbackTransport(self, rank, size, timeout_s) for rank in range(size)]

    def deliver(self, source: int, target: int) -> None:
        sends, recvs = self.sends[source, target], self.recvs[source, target]
        while sends and recvs:
            send, recv = sends.popleft(), recvs.popleft()
            try:
                recv.header.verify(send.header, target, source)
            except errors.PlanMismatch as error:
                # The error belongs to the receiver, but this may be the sender's thread.
                self.failures.post(Failure.from_exception(error, target))
                return
            recv.payload.copy_(send.payload)
            send.done = recv.done = True

    def _deadlock(self) -> None:
        reports = [f"  rank {wire.rank} {wire.report()}" for wire in self.transports]
        meant = {digest for wire in self.transports for digest in wire.waits_in()}
        kind, why = "CollectiveTimeout", "deadlock"
        if len(meant) > 1 and not any(self.turns.finished):
            # If all ranks agreed on the order of operations, the first unfinished operation could
            # run.
            kind, why = "PlanMismatch", "ranks disagree about what they do"
        text = f"{why}: every rank waits or has finished, and no message can be delivered:\n"
        self.failures.post(Failure(kind, None, text + "\n".join(reports)))


class LoopbackTransport(PointToPointTransport):
    """One rank of a ``LoopbackWorld``. Messages are copied once, from tensor to tensor."""

    name = "loopback"
    connects = "threads of one process"

    def __init__(self, world: _World, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(rank, size, torch.device("cpu"), timeout_s, world.failures)
        self._world = world
        self._waiting: Sequence[_LoopbackMessage] = ()

    @classmethod
    def single(cls, timeout_s: float = 300.0) -> LoopbackTransport:
        """Return the transport of a world whose only rank is the calling thread."""
        return _World(1, timeout_s).transports[0]

    def error(self) -> errors.GpudistError | None:
        failure = self.failures.peek()
        return super().error() if failure is None else self.exception_of(failure)

    def waits_in(self) -> set[bytes]:
        """Return the digests of the operations that this rank waits for."""
        return {message.header.digest for message in self._waiting if not message.done}

    def report(self) -> str:
        """Describe what this rank is doing, for the report of a deadlock."""
        if self._world.turns.finished[self.rank]:
            return "has finished"
        waiting = ", ".join(message.words for message in self._waiting if not message.done)
        return f"waits for {waiting}; its last operations: {'; '.join(self.recorder.lines())}"

    def _post_send(
        self, payload: torch.Tensor, peer: int, header: MessageHeader
    ) -> _LoopbackMessage:
        message = _LoopbackMessage(payload, header, f"rank {peer} to receive {header.words()}")
        self._world.sends[self.rank, peer].append(message)
        self._world.deliver(self.rank, peer)
        return message

    def _post_recv(
        self, payload: torch.Tensor, peer: int, header: MessageHeader
    ) -> _LoopbackMessage:
        message = _LoopbackMessage(payload, header, f"rank {peer} to send {header.words()}")
        self._world.recvs[peer, self.rank].append(message)
        self._world.deliver(peer, self.rank)
        return message

    def _wait(self, handles: Sequence[_LoopbackMessage]) -> None:
        def complete() -> bool:
            return all(message.done for message in handles)

        def ready() -> bool:
            failed = self.failures.peek() is not None
            return failed or complete() or time.monotonic() > self._deadline_s

        if TracingContext.try_get() is not None and not ready():
            raise errors.TransportError(
                f"rank {self.rank} would wait for other threads while torch.compile allows only "
                "one to compile: agree on the shapes first, by a call that is not compiled or "
                "with global_shape="
            )
        self._waiting = handles
        self._world.turns.wait(self.rank, ready)
        if not complete():
            self._raise_incomplete()
        self._waiting = ()

    def _raise_incomplete(self) -> None:
        failure = self.failures.peek()
        if failure is not None:
            raise self.exception_of(failure)
        raise errors.CollectiveTimeout(
            f"after {self.timeout_s:g} s rank {self.rank} still {self.report()}"
        )


@dataclass
class _ThreadResult(Generic[T]):
    value: T | None = None
    error: BaseException | None = None


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

    def run(self, body: Callable[[LoopbackTransport], T]) -> list[T]:
        """Call ``body(wire)`` on every rank and return the results, in rank order.

        Raises:
            BaseException: error of the lowest rank that did not merely report the failure of
                another, with a note that names the rank.
        """
        world = _World(self.size, self.timeout_s)
        outcomes: list[_ThreadResult[T]] = [_ThreadResult() for _ in range(self.size)]
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
        for thread in threads:
            thread.start()
        try:
            world.turns.start()
            # Wait in slices: a signal handled in another thread does not end a wait here.
            while not world.turns.all_finished.wait(_SLICE_S):
                pass
        except BaseException as error:
            world.failures.post(
                Failure("PeerFailure", None, f"{type(error).__name__} in the caller")
            )
            world.turns.all_finished.wait(_INTERRUPT_PATIENCE_S)
            raise
        finally:
            torch.set_rng_state(generator_state)
        _raise_cause(outcomes, world.failures.peek())
        return [outcome.value for outcome in outcomes]  # pyright: ignore[reportReturnType]


def _run_rank(
    world: _World,
    wire: LoopbackTransport,
    body: Callable[[LoopbackTransport], Any],
    outcome: _ThreadResult[Any],
) -> None:
    world.turns.enter(wire.rank)
    try:
        outcome.value = body(wire)
    except BaseException as error:
        outcome.error = error
        wire.abort(Failure.from_exception(error, wire.rank))
    finally:
        try:
            wire.close()
            # Cached plans of other worlds hold a reference to this rank; free its operators.
            wire.remembered.clear()
        finally:
            world.turns.finish(wire.rank)


def _raise_cause(outcomes: Sequence[_ThreadResult[Any]], failure: Failure | None) -> None:
    raised = {rank: outcome.error for rank, outcome in enumerate(outcomes) if outcome.error}
    if not raised:
        return
    causes = [rank for rank, error in raised.items() if not _is_echo(error, failure)]
    if causes:
        rank = min(causes)
    elif failure is not None and failure.rank in raised:
        rank = failure.rank
    else:
        rank = min(raised)
    raise _noted(raised[rank], f"raised on rank {rank} of a loopback world of {len(outcomes)}")


def _is_echo(error: BaseException | None, failure: Failure | None) -> bool:
    while error is not None and failure is not None:
        if isinstance(error, errors.GpudistError) and str(error).startswith(failure.message):
            return True
        error = error.__cause__ or error.__context__
    return False


def _noted(error: BaseException, note: str) -> BaseException:
    add_note = getattr(error, "add_note", None)
    if add_note is not None:
        add_note(note)
    elif error.args and isinstance(error.args[0], str):
        # Python 3.10 does not show notes.
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    return error
