"""Ranks of the native host core, which executes stages of plans and carries their messages."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import torch

from gpudist.errors import NotBuiltError
from gpudist.geometry.boxes import Box, Message, Stage, contiguous_strides
from gpudist.native import native as _native, reason
from gpudist.transport.base import BoundSteps, Signature
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.flight_recorder import Activity, Operation, post_of
from gpudist.transport.message_header import MessageHeader
from gpudist.transport.point_to_point import PointToPointTransport


def is_built() -> bool:
    """Return whether this installation has the native core."""
    return _native is not None


def what_is_missing() -> str:
    """Return why the native core is missing and how to install it."""
    return (
        f"this installation of gpudist has no native core ({reason}); install a C++17 compiler "
        f"(Debian: apt-get install g++), then install gpudist again, which keeps your torch: "
        f"GPUDIST_NATIVE=on pip install --force-reinstall --no-deps --no-cache-dir gpudist"
    )


def require_core(transport: str) -> None:
    """Raise if this installation lacks the native core, which ``transport`` needs."""
    if not is_built():
        raise NotBuiltError(f"the {transport} transport: {what_is_missing()}")


class CoreFailureChannel(FailureChannel):
    """Failure channel in memory of the ranks: the first failing one fills it and wakes waiters."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def post(self, failure: Failure) -> None:
        text = failure.to_json()
        while len(text) >= _native.FAILURE_BYTES:
            failure = replace(failure, message=failure.message[: len(failure.message) // 2])
            text = failure.to_json()
        self._core.post_failure(text)

    def peek(self) -> Failure | None:
        text = self._core.failure()
        return Failure.from_json(text) if text else None


class CoreTransport(PointToPointTransport):
    """One rank of a world over the native host core.

    Args:
        rank, size: this rank and number of ranks.
        timeout_s: deadline of every group, in seconds.
        rest: if the ranks are threads, called where this rank can only let others run.

    Raises:
        NotBuiltError: this installation has no native core.
    """

    packs = True
    carries_pieces = True

    def __init__(
        self,
        rank: int,
        size: int,
        timeout_s: float,
        rest: Callable[[], None] | None = None,
    ) -> None:
        require_core(self.name)
        self._core = _native.HostCommunicator(rank, size, timeout_s, rest)
        super().__init__(rank, size, torch.device("cpu"), timeout_s, CoreFailureChannel(self._core))
        self.recorder.number_of = self._core.posted
        self._try_enter, self._leave = self._core.try_enter, self._core.leave
        self.fold = self._core.fold

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
        is_guarded: bool = True,
    ) -> Any:
        boxes = self.express_stage(stage, rank, dtype, accumulates)
        output_shape = stage.output_shape or ()
        own_sums = [contribution for contribution in boxes.sums if contribution.peer is None]
        return _native.BoundStage(
            dtype=getattr(_native.Dtype, str(dtype).removeprefix("torch.")),
            input_strides=list(input_strides) if stage.input_shape is not None else [],
            output_strides=contiguous_strides(output_shape),
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
            own_sources=[_numbers(box) for box in own_sums[0].sources] if own_sums else [],
            relays=_messages(boxes.relays, ranks),
            relayed=_messages(boxes.relayed, ranks),
        )

    def bind_steps(
        self, signature: Signature, activity: Activity | None, steps: Sequence[Any]
    ) -> BoundSteps:
        if activity is None:
            bound = _native.Round(None, None, steps)
        else:
            bound = _native.Round(
                self._core, native_signature(signature), steps, self.recorder, activity,
                self.end_steps,
            )  # fmt: skip
        return BoundSteps(bound.run, bound.run_like_last)

    def start_stages(
        self, signature: Signature, calls: Sequence[tuple[Any, int, int]], activity: Activity
    ) -> _CoreStages:
        operation = self.recorder.begin(activity, "start")
        try:
            exchange = _native.Exchange(self._core, native_signature(signature), calls)
        except BaseException as error:
            self.end_with(error)
        finally:
            self.recorder.leave(operation)
        return _CoreStages(self, exchange, operation, len(calls))

    @contextmanager
    def start_pieces(
        self,
        signature: Signature,
        sends: bool,
        peers: Sequence[int],
        pieces: Sequence[tuple[int, int]],
    ) -> Generator[None, None, None]:
        size_bytes = sum(part_bytes for _, part_bytes in pieces)
        posts = [post_of(sends, peer, size_bytes) for peer in peers]
        operation = self.recorder.begin(self.recorder.new_activity(signature.label, posts), "start")
        try:
            self._begin(signature)
            message = _native.Pieces(self._core, native_signature(signature), sends, peers, pieces)
        except BaseException as error:
            self.end_with(error)
        finally:
            self.recorder.leave(operation)
        try:
            yield
        except BaseException as error:
            self.end_with(error)
        _CoreStages(self, message, operation, 1).wait()

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

    def _begin(self, signature: Signature) -> None:
        self._core.begin(native_signature(signature))

    def _next_number(self, sends: bool, peer: int) -> int:
        return self._core.posted(sends, peer)

    def _post(self, sends: bool, payload: torch.Tensor, peer: int, header: MessageHeader) -> Any:
        signature = native_signature(Signature(header.label, header.digest))
        pieces = [(payload.data_ptr(), payload.numel())]
        return _native.Pieces(self._core, signature, sends, [peer], pieces), payload

    def _wait(self, handles: Sequence[Any]) -> None:
        for message, _ in handles:
            message.wait()

    def end_with(self, error: BaseException) -> NoReturn:
        """Fail the world with an error of the native core and raise it as an error of gpudist."""
        if not isinstance(error, _native.WorldFailed):
            super().end_with(error)
        failure = self.failures.peek()
        assert failure is not None
        self._failure = failure
        self._raise_failure(self.exception_of(failure), error)


class _CoreStages:
    """Native object with ``left`` calls in flight; an error in a wait fails the world."""

    def __init__(self, wire: CoreTransport, native: Any, operation: Operation, left: int) -> None:
        self._wire = wire
        self._native = native
        self._operation = operation
        self._left = left

    def wait(self, *call: int) -> None:
        recorder, operation = self._wire.recorder, self._operation
        entered_s = recorder.enter(operation)
        try:
            self._native.wait(*call)
        except BaseException as error:
            recorder.leave(operation, entered_s)
            self._wire.end_with(error)
        self._left -= 1
        (recorder.leave if self._left else recorder.end)(operation, entered_s)


@lru_cache(maxsize=4096)
def native_signature(signature: Signature) -> Any:
    """Return the native core's form of a signature."""
    return _native.Signature(signature.label, signature.digest)


def _numbers(box: Box) -> list[int]:
    return [*box.start, *box.stop]


def _messages(
    messages: Sequence[Message], ranks: Sequence[int]
) -> list[tuple[int, list[list[int]]]]:
    return [(ranks[message.peer], [_numbers(box) for box in message.boxes]) for message in messages]
