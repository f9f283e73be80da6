"""What one rank does in a stage on a GPU, in numbers: jobs of the kernel and calls of NCCL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch

from gpudist.transport.base import Signature
from gpudist.transport.nccl.verbs import Call

try:
    import gpudist._native as _native
except ImportError:
    _native = None

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
class View:
    """Where the cells of a box lie: items from a buffer's first, and between neighbours."""

    buffer: BufferName
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """A box that becomes the sum of others; ``there`` already if it was received in place."""

    shape: tuple[int, ...]
    destination: View
    summands: tuple[View, ...] = ()
    there: bool = False


@dataclass(frozen=True)
class Step:
    """A call of NCCL's on a contiguous piece of a buffer.

    Attributes:
        members: world ranks of the communicator, ``None`` for the world's.
        peer: by rank in the communicator.
        offset, to_offset: bytes.
        count: items of ``dtype``.
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
    """What one rank does in a stage: ``before`` the calls, the calls, and ``after`` them."""

    dtype: torch.dtype
    before: list[Job] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    after: list[Job] = field(default_factory=list)
    sent_bytes: int = 0
    received_bytes: int = 0
    in_graph: bool = False

    @property
    def is_direct(self) -> bool:
        """Whether NCCL gets the address of a tensor, not only of staging memory."""
        return any("input" in ends or "output" in ends for ends in map(_ends, self.steps))

    def room(self, buffer: Literal["sent", "received"], nbytes: int) -> int:
        """Offset in bytes of ``nbytes`` more of a staging buffer."""
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
        """The native stage; makes the communicators it needs, in the order all ranks make them.

        Args:
            core: the native world.
            native: the native communicator of some world ranks.
            fill: value of cells that nobody sends.
            captured: the native stage in its place where a graph is captured.
        """
        assert _native is not None
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


def _ends(step: Step) -> tuple[BufferName, ...]:
    """The buffers that a call of NCCL's reads and writes."""
    if step.kind == "send":
        return (step.source,)
    return (step.target,) if step.kind == "receive" else (step.source, step.target)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in items of a tensor of ``shape`` without gaps, the last dim fastest."""
    strides: list[int] = []
    stride = 1
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(strides[::-1])


def _numbers(job: Job) -> tuple[Any, ...]:
    assert _native is not None
    views = [
        (getattr(_native.Buffer, view.buffer), view.offset, list(view.strides))
        for view in (job.destination, *job.summands)
    ]
    return list(job.shape), views, job.there


def native_call(call: Call, communicator: Any) -> tuple[Any, ...]:
    """A verb's call as the native core takes it; no communicator stands for the world's."""
    assert _native is not None
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


@lru_cache(maxsize=4096)
def native_signature(signature: Signature) -> Any:
    """The native core's own of a signature."""
    assert _native is not None
    return _native.Signature(signature.label, signature.digest)
