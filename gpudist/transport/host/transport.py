"""Host transport: shared memory between the processes of one node, without GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpudist.errors import NotBuiltError
from gpudist.geometry.boxes import Box, Message, Stage
from gpudist.transport.base import BoundSteps, Signature
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.failure.store import STORE_ERRORS, store_gone
from gpudist.transport.flight_recorder import Activity, Operation, Post
from gpudist.transport.host.meeting import HostMeeting
from gpudist.transport.host.processes import forbidden_call
from gpudist.transport.message_header import MessageHeader
from gpudist.transport.point_to_point import PointToPointTransport
from gpudist.transport.world_facts import WorldFacts

try:
    import gpudist._native as _native

    _reason = ""
except ImportError as error:
    _native = None
    _reason = str(error)


def is_built() -> bool:
    """Return whether this installation has the native core."""
    return _native is not None


def what_is_missing() -> str:
    """Return why the native core is missing and how to install it."""
    return (
        f"this installation of gpudist has no native core ({_reason}); install a C++17 compiler "
        f"(Debian: apt-get install g++), then install gpudist again, which keeps your torch: "
        f"GPUDIST_NATIVE=on pip install --force-reinstall --no-deps --no-cache-dir gpudist"
    )


class HostFailureChannel(FailureChannel):
    """Failure channel in shared memory: the first failing rank fills it and wakes all waiters."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def post(self, failure: Failure) -> None:
        assert _native is not None
        text = failure.to_json()
        while len(text) >= _native.FAILURE_BYTES:
            failure = replace(failure, message=failure.message[: len(failure.message) // 2])
            text = failure.to_json()
        self._core.post_failure(text)

    def peek(self) -> Failure | None:
        text = self._core.failure()
        return Failure.from_json(text) if text else None


class HostTransport(PointToPointTransport):
    """One rank of a world of processes on one node.

    The constructor is collective: it returns once every rank has mapped the control blocks of all
    others. Memory for messages is allocated when two ranks first communicate. The memory has no
    name in the file system, and is freed when the processes end.

    Args:
        store: rendezvous store, not used afterwards.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every group, in seconds.
        prefix: prefix of the keys in ``store``, unique per world.
        store_rank: world rank whose process hosts the store, or ``None`` if none of them does.
        pulls: whether to read large messages directly from the sender's memory if the system
            allows it.
        look: called during the rendezvous; raises the failure of a surrounding world.

    Raises:
        NotBuiltError: this installation has no native core.
        CollectiveTimeout: a rank did not arrive in time.
        PeerFailure: a rank died meanwhile.
        TransportError: an entry in the store is unreadable, or is not a segment of this user.
        NotOneNode: on every rank, if two ranks cannot access each other's memory, or the system
            forbids a rank to share its memory.
    """

    name = "host"
    connects = "between processes of one node"
    packs = True
    carries_pieces = True

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout_s: float,
        *,
        prefix: str,
        store_rank: int | None = None,
        pulls: bool = True,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        if _native is None:
            raise NotBuiltError(f"the host transport: {what_is_missing()}")
        meeting = HostMeeting(store, prefix, rank, size, timeout_s, store_rank, look)
        if call := forbidden_call():
            with closing(meeting):
                meeting.refuse(call)
        self._core = _native.HostCommunicator(rank, size, timeout_s, pulls)
        super().__init__(rank, size, torch.device("cpu"), timeout_s, HostFailureChannel(self._core))
        self.recorder.number_of = self._core.posted
        self._try_enter, self._leave = self._core.try_enter, self._core.leave
        operation = self.recorder.begin_group(f"connect {size} ranks")
        try:
            with closing(meeting):
                meeting.hold(self._core)
        except BaseException as error:
            self.close()
            if isinstance(error, STORE_ERRORS):
                raise self.exception_of(store_gone(store_rank, error)) from error
            raise
        self.recorder.end(operation)

    @classmethod
    def connect(cls, facts: WorldFacts) -> HostTransport:
        return cls(
            facts.store, facts.rank, facts.size, facts.timeout_s,
            prefix=facts.prefix, store_rank=facts.store_rank, look=facts.look,
        )  # fmt: skip

    def bind_stage(
        self,
        stage: Stage,
        ranks: Sequence[int],
        rank: int,
        input_strides: Sequence[int],
        dtype: torch.dtype,
        fill: float,
        accumulates: bool = False,
        output_strides: Sequence[int] | None = None,
    ) -> Any:
        assert _native is not None
        boxes = self.carried(stage, rank, dtype, accumulates)
        output_shape = stage.output_shape or ()
        own = [contribution for contribution in boxes.sums if contribution.peer is None]
        return _native.BoundStage(
            dtype=getattr(_native.Dtype, str(dtype).removeprefix("torch.")),
            input_strides=list(input_strides) if stage.input_shape is not None else [],
            output_strides=_contiguous_strides(output_shape),
            output_items=Box.whole(output_shape).volume if stage.output_shape is not None else 0,
            fill=fill,
            starts_with_copy=boxes.starts_with_copy,
            same_cells=boxes.same_cells,
            accumulates=accumulates,
            fills=[_numbers(box) for box in boxes.fills],
            move_sources=[_numbers(move.source) for move in boxes.moves],
            move_destinations=[_numbers(move.destination) for move in boxes.moves],
            sends=_messages(boxes.sends, ranks),
            receives=_messages(boxes.receives, ranks),
            sums=[
                (
                    -1 if contribution.peer is None else ranks[contribution.peer],
                    [_numbers(box) for box in contribution.destinations],
                )
                for contribution in boxes.sums
            ],
            own_sources=[_numbers(box) for box in own[0].sources] if own else [],
            relays=_messages(boxes.relays, ranks),
            relayed=_messages(boxes.relayed, ranks),
        )

    def bind_steps(
        self, signature: Signature, activity: Activity | None, steps: Sequence[Any]
    ) -> BoundSteps:
        assert _native is not None
        if activity is None:
            bound = _native.Round(None, None, steps)
        else:
            bound = _native.Round(
                self._core, _native_signature(signature), steps, self.recorder, activity,
                self.steps_failed,
            )  # fmt: skip
        return BoundSteps(bound.run, bound.run_like_last)

    def start_stages(
        self, signature: Signature, calls: Sequence[tuple[Any, int, int]], activity: Activity
    ) -> _HostStages:
        assert _native is not None
        operation = self.recorder.begin(activity, "start")
        try:
            exchange = _native.Exchange(self._core, _native_signature(signature), calls)
        except BaseException as error:
            self.end_with(error)
        finally:
            self.recorder.leave(operation)
        return _HostStages(self, exchange, operation, len(calls))

    def start_pieces(
        self,
        signature: Signature,
        sends: bool,
        peers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> PiecesInFlight:
        assert _native is not None
        size_bytes = sum(part_bytes for _, part_bytes in pieces)
        posts = [
            Post("send", peer, size_bytes, 0) if sends else Post("receive", peer, 0, size_bytes)
            for peer in peers
        ]
        operation = self.recorder.begin(self.recorder.new_activity(signature.label, posts), "start")
        native_signature = _native_signature(signature)
        try:
            message = _native.Pieces(self._core, native_signature, sends, peers, pieces)
        except BaseException as error:
            self.end_with(error)
        finally:
            self.recorder.leave(operation)
        return PiecesInFlight(self, message, operation)

    def error(self) -> Any:
        failure = self._failure or self.failures.peek()
        return self.exception_of(failure) if failure is not None else super().error()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._core.close()

    def leave_to_parent(self) -> None:
        super().leave_to_parent()
        if self.size > 1:
            self._core.leave_to_parent()

    def _group_end(self) -> None:
        assert _native is not None
        try:
            self._core.begin(_native_signature(self._group().signature))
        except _native.WorldFailed as error:
            self._raise_failure(error)
        super()._group_end()

    def _next_number(self, sends: bool, peer: int) -> int:
        return self._core.posted(sends, peer)

    def _post_send(self, payload: torch.Tensor, peer: int, header: MessageHeader) -> Any:
        signature = _native_signature(Signature(header.label, header.digest))
        message = self._core.post_send(payload.data_ptr(), payload.numel(), peer, signature)
        return message, payload

    def _post_recv(self, payload: torch.Tensor, peer: int, header: MessageHeader) -> Any:
        signature = _native_signature(Signature(header.label, header.digest))
        message = self._core.post_receive(payload.data_ptr(), payload.numel(), peer, signature)
        return message, payload

    def _wait(self, handles: Sequence[Any]) -> None:
        assert _native is not None
        try:
            self._core.wait([message for message, _ in handles])
        except _native.WorldFailed as error:
            self._raise_failure(error)

    def end_with(self, error: BaseException) -> NoReturn:
        """Fail the world with an error of the native core and raise it as an error of gpudist."""
        assert _native is not None
        if isinstance(error, _native.WorldFailed):
            self._raise_failure(error)
        self._fail(error)
        raise error

    def _raise_failure(self, error: BaseException) -> NoReturn:
        failure = self.failures.peek()
        assert failure is not None
        self._failure = failure
        self.report_failure(failure)
        raise self.exception_of(failure) from error


class _HostStages:
    def __init__(self, wire: HostTransport, exchange: Any, operation: Operation, left: int) -> None:
        self._wire = wire
        self._exchange = exchange
        self._operation = operation
        self._left = left

    def wait(self, call: int) -> None:
        recorder, operation = self._wire.recorder, self._operation
        entered_s = recorder.enter(operation)
        try:
            self._exchange.wait(call)
        except BaseException as error:
            recorder.leave(operation, entered_s)
            self._wire.end_with(error)
        self._left -= 1
        (recorder.leave if self._left else recorder.end)(operation, entered_s)


class PiecesInFlight:
    """Message in flight until the end of a ``with`` statement; an error there fails the world."""

    def __init__(self, wire: HostTransport, message: Any, operation: Operation) -> None:
        self._wire = wire
        self._message = message
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._wire.end_with(error)
        recorder, operation = self._wire.recorder, self._operation
        entered_s = recorder.enter(operation)
        try:
            self._message.wait()
        except BaseException as failure:
            recorder.leave(operation, entered_s)
            self._wire.end_with(failure)
        recorder.end(operation, entered_s)


@lru_cache(maxsize=4096)
def _native_signature(signature: Signature) -> Any:
    assert _native is not None
    return _native.Signature(signature.label, signature.digest)


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides: list[int] = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return strides[::-1]


def _numbers(box: Box) -> list[int]:
    return [*box.start, *box.stop]


def _messages(
    messages: Sequence[Message], ranks: Sequence[int]
) -> list[tuple[int, list[list[int]]]]:
    return [(ranks[message.peer], [_numbers(box) for box in message.boxes]) for message in messages]
