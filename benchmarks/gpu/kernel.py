"""The kernel alone, and hand-made stages: jobs and messages without an operator."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from types import SimpleNamespace

import torch

from benchmarks.case import Side
from benchmarks.gpu.itself import itself
from gpudist.transport.base import Signature
from gpudist.transport.nccl.program import Lowered
from gpudist.transport.nccl.transport import NcclTransport, _native, native_signature
from gpudist.world.partition import Partition


def bound(
    P_world: Partition,
    lowered: Lowered,
    x: torch.Tensor,
    make_output: Callable[[], torch.Tensor],
    label: str = "",
    fill: float = 0.0,
) -> Callable[[], torch.Tensor]:
    """Return a function that executes a stage on ``x`` in one native call.

    Args:
        P_world: partition over the nccl transport.
        lowered: the jobs, and the messages if there are any.
        x: the input.
        make_output: returns the output, new or existing.
        label: name of an operation between ranks, whose last kernel reads the word of a failed
            world; in a world of one its messages go to the rank itself. Empty if it is local.
        fill: value of cells without a summand.
    """
    wire = P_world.wire
    assert isinstance(wire, NcclTransport) and _native is not None
    alone = itself(P_world.device) if label and P_world.size == 1 else None
    core, native = (wire._core, wire.native) if alone is None else (alone.core, alone.native)
    stage = lowered.bind(core, native, fill)
    bound = {x.stride(): (stage, make_output)}
    signature = None
    if label:
        digest = blake2b(label.encode(), digest_size=16).digest()
        signature = native_signature(Signature(label, digest))
    step = SimpleNamespace(
        takes=True, gives=True, dtype=x.dtype, input_shape=None, input_dtype=None, block=_itself,
        make_output=make_output, bound=bound, bind=bound.__getitem__,
    )  # fmt: skip
    device = -1 if P_world.device.index is None else P_world.device.index
    run = _native.DeviceRound(core, signature, device, [step], wire.stream).run
    blocks = (x,)
    return lambda: run(blocks)[0]  # pyright: ignore[reportReturnType]


def copy_of(nbytes: int, device: torch.device) -> Side:
    """Return the ceiling: the device's own copy, which reads and writes ``nbytes`` in total."""
    source = random((max(1, nbytes // 2),), torch.uint8, device)
    target = torch.empty_like(source)
    return Side(lambda: target.copy_(source), equal_to(source), target.zero_)


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return whole numbers below 8, whose small sums are exact in every dtype."""
    return torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 8).to(dtype)


def equal_to(expected: torch.Tensor) -> Callable[[torch.Tensor], bool]:
    """Return a check that a tensor has exactly these cells."""
    return lambda result: torch.equal(result, expected)


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x
