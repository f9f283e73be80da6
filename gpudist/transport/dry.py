"""Dry runs: a single rank posts its messages, which are counted and dropped.

Tensors are on the ``meta`` device and have shapes but no data, so a network of any size can run on
one processor. The messages are those of the plans that would move the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, Protocol

import torch

from gpudist.geometry.boxes import Box, CollectiveKind, Message, Stage
from gpudist.geometry.messages import MessageStage
from gpudist.transport.base import BoundSteps, Signature
from gpudist.transport.failure.channel import Failure, FailureChannel
from gpudist.transport.flight_recorder import Activity
from gpudist.transport.message_header import MessageHeader
from gpudist.transport.nccl.stages import carry_by_nccl, collectives_by_nccl
from gpudist.transport.point_to_point import PointToPointTransport

META = torch.device("meta")

Posting = Literal["nccl", "host", "gloo"]


def posting_of(transport: str) -> Posting:
    """Return the transport that posts the same messages as ``transport``."""
    # Loopback runs on the core of the host transport.
    return transport if transport in ("nccl", "gloo") else "host"  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Posted:
    """One side of a message.

    Attributes:
        peer: world rank of the other side.
        size_bytes: size of the data in bytes, without header.
        rows: number of contiguous pieces that it is packed from or unpacked to.
    """

    peer: int
    size_bytes: int
    rows: int


@dataclass(frozen=True)
class SharedCollective:
    """Collective that the transport has a verb for.

    Attributes:
        kind: kind of the collective.
        members: world ranks of the members.
        size_bytes: size in bytes of one rank's tensor.
    """

    kind: CollectiveKind
    members: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Data that one rank moves in a stage: messages, collectives and local copies."""

    sends: tuple[Posted, ...] = ()
    receives: tuple[Posted, ...] = ()
    collectives: tuple[SharedCollective, ...] = ()
    copied_bytes: int = 0


class Listener(Protocol):
    """Receiver of the traffic of a dry transport."""

    def exchange(self, traffic: Traffic) -> None:
        """Record a group of messages that completes before anything else happens."""

    def start(self, traffic: Traffic) -> object:
        """Record the start of a group of messages; :meth:`wait` gets the returned object."""

    def wait(self, started: object) -> None:
        """Record that the rank waits for a result of the started group."""


class DryFailures(FailureChannel):
    """Failure channel of a world with a single rank."""

    def __init__(self) -> None:
        self._failure: Failure | None = None

    def post(self, failure: Failure) -> None:
        self._failure = self._failure or failure

    def peek(self) -> Failure | None:
        return self._failure


class DryTransport(PointToPointTransport):
    """One rank of a world whose other ranks do not exist.

    Args:
        rank, size: rank of this process and number of ranks.
        listener: receives every group of messages.
        global_shape_of: returns the global shape of a tensor from the shape of a block, the grid
            and the block's index. In a real world the ranks agree on it by messages.
        posting: transport whose messages are posted; NCCL has its own collectives.
    """

    name = "dry"

    def __init__(
        self,
        rank: int,
        size: int,
        listener: Listener,
        global_shape_of: Callable[[Sequence[int], Sequence[int], Sequence[int]], tuple[int, ...]],
        posting: Posting = "nccl",
    ) -> None:
        super().__init__(rank, size, META, float("inf"), DryFailures())
        self._posting = posting
        self.packs = posting != "gloo"
        self.keeps_layout = self.has_streams = posting == "nccl"
        # Blocks without data take the ways of blocks on a GPU.
        self.device_library = "dry" if posting == "nccl" else ""
        self._listener = listener
        self._global_shape_of = global_shape_of
        self._sends: list[Posted] = []
        self._receives: list[Posted] = []

    def known_global_shape(
        self, shape: Sequence[int], grid: Sequence[int], index: Sequence[int]
    ) -> tuple[int, ...]:
        return self._global_shape_of(shape, grid, index)

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
    ) -> Traffic:
        return traffic_of(self.express_stage(stage, rank, dtype, accumulates), stage, ranks, dtype)

    def express_stage(
        self, stage: Stage, rank: int, dtype: torch.dtype, accumulates: bool
    ) -> MessageStage:
        if self._posting == "nccl":
            return carry_by_nccl(stage, rank, dtype, accumulates, collectives_by_nccl)
        return super().express_stage(stage, rank, dtype, accumulates)

    def bind_steps(
        self, signature: Signature, activity: Activity | None, steps: Sequence[Any]
    ) -> BoundSteps:
        def run(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
            traffic: list[Traffic] = []
            outputs = [
                x if step is None else _carry_out(step, x, traffic)
                for step, x in zip(steps, tensors, strict=True)
            ]
            if traffic:
                self._listener.exchange(_merge(traffic))
            return outputs

        return BoundSteps(run)

    def start_stages(
        self, signature: Signature, calls: Sequence[Any], activity: Activity
    ) -> _DryStages:
        traffic = _merge([stage for stage, _, _ in calls])
        return _DryStages(self._listener, self._listener.start(traffic))

    def _post(self, sends: bool, payload: torch.Tensor, peer: int, header: MessageHeader) -> None:
        (self._sends if sends else self._receives).append(Posted(peer, payload.numel(), 1))

    def _wait(self, handles: Sequence[Any]) -> None:
        if self._sends or self._receives:
            self._listener.exchange(Traffic(tuple(self._sends), tuple(self._receives)))
        self._sends, self._receives = [], []


class _DryStages:
    def __init__(self, listener: Listener, started: object) -> None:
        self._listener = listener
        self._started = started

    def wait(self, call: int) -> None:
        self._listener.wait(self._started)


def traffic_of(
    carried: MessageStage, stage: Stage, ranks: Sequence[int], dtype: torch.dtype
) -> Traffic:
    """Return the traffic between world ``ranks`` of what the transport carries for ``stage``."""

    def posted(message: Message) -> Posted:
        size_bytes = message.volume * dtype.itemsize
        return Posted(ranks[message.peer], size_bytes, sum(map(rows_of, message.boxes)))

    own_sums = [contribution for contribution in carried.sums if contribution.peer is None]
    copied = [move.source for move in carried.moves]
    copied += [box for contribution in own_sums for box in contribution.sources]
    whole_bytes = prod(stage.output_shape or stage.input_shape or (0,)) * dtype.itemsize
    return Traffic(
        tuple(map(posted, (*carried.sends, *carried.relays))),
        tuple(map(posted, (*carried.incoming, *carried.relayed))),
        tuple(
            SharedCollective(c.kind, tuple(ranks[member] for member in c.members), whole_bytes)
            for c in carried.collectives
        ),
        copied_bytes=sum(box.volume for box in copied) * dtype.itemsize,
    )


def rows_of(box: Box) -> int:
    """Return the number of rows of a box along its last dim."""
    return box.volume // max(1, box.shape[-1]) if box.shape else 1


def _carry_out(step: Any, x: torch.Tensor | None, traffics: list[Traffic]) -> torch.Tensor | None:
    if x is not None and step.input_shape is not None:
        x = step.block(x)
    strides: tuple[int, ...] = ()
    if step.takes:
        assert x is not None
        strides = x.stride()
    if not (step.takes or step.gives):
        return step.make_output()
    traffic, make = step.bound.get(strides) or step.bind(strides)
    traffics.append(traffic)
    return make()


def _merge(parts: Sequence[Traffic]) -> Traffic:
    return Traffic(
        tuple(message for part in parts for message in part.sends),
        tuple(message for part in parts for message in part.receives),
        tuple(shared for part in parts for shared in part.collectives),
        sum(part.copied_bytes for part in parts),
    )
