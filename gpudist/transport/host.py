"""Shared memory between the processes of one node: the wire for machines without GPUs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gpudist.errors import CollectiveTimeout, NotBuiltError
from gpudist.geometry.boxes import Box, Message, Stage
from gpudist.geometry.messages import as_messages
from gpudist.transport.base import Failure, FailureChannel, Signature
from gpudist.transport.message import Header
from gpudist.transport.point_to_point import PointToPointTransport

try:
    import gpudist._native as _native

    _reason = ""
except ImportError as error:
    _native = None
    _reason = str(error)

_POLL_S = 0.002


def is_built() -> bool:
    """Whether this installation has the native core."""
    return _native is not None


def what_is_missing() -> str:
    """Why there is no native core, and how to get it."""
    return (
        f"this installation of gpudist has no native core ({_reason}); install CMake and a C++17 "
        f"compiler (Debian: apt-get install g++ cmake), then pip install --force-reinstall gpudist"
    )


class HostFailureChannel(FailureChannel):
    """A slot in shared memory that the first failing rank fills; whoever waits is woken."""

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

    Constructing it is collective: it returns once every rank has mapped the others' control blocks.
    Memory for messages is made when two ranks first talk, belongs to no name, and goes with the
    processes.

    Args:
        store: where the ranks meet; not used afterwards.
        rank, size: this process in the world.
        timeout_s: deadline of every group, in seconds.
        prefix: first part of the keys in ``store``; one per world.

    Raises:
        NotBuiltError: this installation has no native core.
        CollectiveTimeout: a rank did not arrive in time.
    """

    name = "host"
    packs = True

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout_s: float, *, prefix: str
    ) -> None:
        if _native is None:
            raise NotBuiltError(f"the host transport: {what_is_missing()}")
        self._core = _native.HostCommunicator(rank, size, timeout_s)
        super().__init__(rank, size, torch.device("cpu"), timeout_s, HostFailureChannel(self._core))
        operation = self.recorder.begin(f"connect {size} ranks")
        self._meet(store, prefix)
        operation.finished = True

    def bind_stage(
        self,
        stage: Stage,
        ranks: Sequence[int],
        rank: int,
        input_strides: Sequence[int],
        dtype: torch.dtype,
        fill: float,
        added_to: Sequence[int] | None = None,
    ) -> Any:
        assert _native is not None
        stage = as_messages(stage, rank)
        output_shape = stage.output_shape or ()
        contiguous = _contiguous_strides(output_shape)
        return _native.Stage(
            dtype=getattr(_native.Dtype, str(dtype).removeprefix("torch.")),
            input_strides=list(input_strides) if stage.input_shape is not None else [],
            output_strides=contiguous if added_to is None else list(added_to),
            output_items=Box.whole(output_shape).volume if stage.output_shape is not None else 0,
            fill=fill,
            clears=not stage.covers_output and added_to is None,
            adds=stage.destinations_overlap or added_to is not None,
            move_sources=[_numbers(move.source) for move in stage.moves],
            move_destinations=[_numbers(move.destination) for move in stage.moves],
            sends=_messages(stage.sends, ranks),
            receives=_messages(stage.receives, ranks),
            own_place=sum(message.peer < rank for message in stage.receives),
        )

    def run_stages(self, signature: Signature, calls: Sequence[tuple[Any, int, int]]) -> None:
        self.check()
        operation = self.recorder.begin(signature.label)
        try:
            self._core.run(_native_signature(signature), calls)
        except BaseException as error:
            self._end_with(error)
        operation.finished = True

    def run_local_stage(self, call: tuple[Any, int, int]) -> None:
        assert _native is not None
        _native.run_local(*call)

    def error(self) -> Any:
        failure = self._failure or self.failures.peek()
        return failure.to_exception() if failure is not None else super().error()

    def close(self) -> None:
        if not self._closed:
            super().close()
            self._core.close()

    def _meet(self, store: dist.Store, prefix: str) -> None:
        """Tell the others where this rank's control block is, and map theirs."""
        deadline_s = time.monotonic() + self.timeout_s
        keys = [f"{prefix}/host/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], json.dumps(self._core.address()))
        self._await_keys(store, keys, deadline_s)
        self._core.connect([tuple(json.loads(store.get(key))) for key in keys])
        # A rank that ended before another had mapped its block could not be told from a dead one.
        mapped = [f"{key}/mapped" for key in keys]
        store.set(mapped[self.rank], "")
        self._await_keys(store, mapped, deadline_s)

    def _await_keys(self, store: dist.Store, keys: Sequence[str], deadline_s: float) -> None:
        while not store.check(list(keys)):
            if time.monotonic() > deadline_s:
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise CollectiveTimeout(
                    f"after {self.timeout_s:g} s rank {self.rank} (process {os.getpid()}) still "
                    f"misses ranks {missing} of {self.size}; are they running, on the same node?"
                )
            time.sleep(_POLL_S)

    def _group_end(self) -> None:
        self._core.begin(_native_signature(self._group().signature))
        super()._group_end()

    def _post_send(self, payload: torch.Tensor, peer: int, header: Header) -> Any:
        signature = _native_signature(Signature(header.label, header.digest))
        message = self._core.post_send(payload.data_ptr(), payload.numel(), peer, signature)
        return message, payload

    def _post_recv(self, payload: torch.Tensor, peer: int, header: Header) -> Any:
        signature = _native_signature(Signature(header.label, header.digest))
        message = self._core.post_receive(payload.data_ptr(), payload.numel(), peer, signature)
        return message, payload

    def _wait(self, handles: Sequence[Any]) -> None:
        assert _native is not None
        try:
            self._core.wait([message for message, _ in handles])
        except _native.WorldFailed as error:
            self._raise_failure(error)

    def _end_with(self, error: BaseException) -> NoReturn:
        assert _native is not None
        if isinstance(error, _native.WorldFailed):
            self._raise_failure(error)
        self._fail(error)
        raise error

    def _raise_failure(self, error: BaseException) -> NoReturn:
        failure = self.failures.peek()
        assert failure is not None
        self._failure = failure
        raise failure.to_exception() from error


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
