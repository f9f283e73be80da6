"""Program of one rank for a stage on a GPU: jobs of the combine kernel and calls of NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gpudist.native import native as _native
from gpudist.transport.nccl.verbs import NcclCall

BufferName = Literal["input", "output", "sent", "received"]

# ncclDataType_t and ncclRedOp_t.
NCCL_DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
NCCL_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3}

_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class BufferView:
    """Location of a box in a buffer: offset of its first item and strides, in items."""

    buffer: BufferName
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class CombineJob:
    """Box computed as the sum of others; ``there`` if it has already been received in place."""

    shape: tuple[int, ...]
    destination: BufferView
    summands: tuple[BufferView, ...] = ()
    there: bool = False


@dataclass(frozen=True)
class NcclStep:
    """Call of NCCL on a contiguous piece of a buffer.

    Attributes:
        kind: name of the call, a member of ``WireKind``.
        members: world ranks of the communicator, ``None`` for the world communicator.
        peer: rank of the peer or root in the communicator.
        source, target: buffers to read and to write.
        offset, to_offset: offsets in source and target, in bytes.
        count: number of items of ``dtype``.
        dtype: dtype of the items, in NCCL's terms.
    """

    kind: str
    members: tuple[int, ...] | None
    peer: int
    source: BufferName
    offset: int
    target: BufferName
    to_offset: int
    count: int
    dtype: str


@dataclass
class Lowered:
    """Program of one rank for a stage: jobs ``before`` the calls, calls, and jobs ``after``."""

    dtype: torch.dtype
    before: list[CombineJob] = field(default_factory=list)
    steps: list[NcclStep] = field(default_factory=list)
    after: list[CombineJob] = field(default_factory=list)
    sent_bytes: int = 0
    received_bytes: int = 0
    in_graph: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether NCCL accesses memory of tensors, not only staging memory."""
        return any("input" in ends or "output" in ends for ends in map(_ends, self.steps))

    def room(self, buffer: Literal["sent", "received"], nbytes: int) -> int:
        """Reserve ``nbytes`` more of a staging buffer and return their offset in bytes."""
        name = f"{buffer}_bytes"
        start = getattr(self, name)
        setattr(self, name, start + -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        return start

    def bind(
        self,
        core: Any,
        native: Callable[[Sequence[int]], Any],
        fill: float,
        captured: Any = None,
    ) -> Any:
        """Return the native stage.

        Creates the communicators it needs, in the same order on all ranks.

        Args:
            core: native world.
            native: returns the native communicator of world ranks.
            fill: value of output cells that receive nothing.
            captured: native stage that replaces this one while a CUDA graph is captured.
        """
        for members in sorted({step.members for step in self.steps if step.members is not None}):
            native(members)
        return _native.DeviceStage(
            core,
            getattr(_native.Dtype, str(self.dtype).removeprefix("torch.")),
            fill,
            [_numbers(job) for job in self.before],
            [_numbers(job) for job in self.after],
            [
                (
                    getattr(_native.WireKind, step.kind),
                    native(step.members) if step.members is not None else None,
                    step.peer,
                    getattr(_native.Buffer, step.source),
                    step.offset,
                    getattr(_native.Buffer, step.target),
                    step.to_offset,
                    step.count,
                    NCCL_DTYPES[step.dtype],
                    NCCL_OPS["sum"],
                )
                for step in self.steps
            ],
            self.sent_bytes,
            self.received_bytes,
            captured,
        )


def _ends(step: NcclStep) -> tuple[BufferName, ...]:
    if step.kind == "send":
        return (step.source,)
    return (step.target,) if step.kind == "receive" else (step.source, step.target)


def _numbers(job: CombineJob) -> tuple[Any, ...]:
    views = [
        (getattr(_native.Buffer, view.buffer), view.offset, list(view.strides))
        for view in (job.destination, *job.summands)
    ]
    return list(job.shape), views, job.there


def native_call(call: NcclCall, communicator: Any) -> tuple[Any, ...]:
    """Convert a call to arguments of the native core; ``None`` is the world communicator."""
    return (
        getattr(_native.WireKind, call.kind),
        communicator,
        call.peer,
        call.source.data_ptr() if call.source is not None else 0,
        call.target.data_ptr() if call.target is not None else 0,
        call.count,
        NCCL_DTYPES[call.dtype],
        NCCL_OPS[call.op],
    )
