"""A world of one with its own communicator, which one GPU allows with every NCCL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from gpudist.transport.base import Signature
from gpudist.transport.failure.channel import Failure
from gpudist.transport.host.core_transport import native_signature
from gpudist.transport.nccl.streams import stream_of
from gpudist.transport.nccl.transport import _native
from gpudist.world.environment import describe
from tests.gpu.devices import ON_DOUBLES, SETTINGS

TIMEOUT_S = 60.0
CLOSING_S = 10.0
# ncclUint8 and ncclSum.
_BYTES, _SUM = 1, 0


class SelfCommunicator:
    """The native core of one rank, and the communicator that its messages to itself take.

    Attributes:
        core: ``NcclWorld`` of the native module.
        device: where its tensors are.
    """

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        assert _native is not None
        self.device = torch.device("cpu" if ON_DOUBLES else "cuda:0")
        self.core: Any = _native.NcclWorld(
            0, 1, 0, timeout_s, _library().path, [], SETTINGS.device_library
        )
        self.core.connect(self.core.new_id(), [0])
        self.stream = stream_of(self.device)

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """One group: a message from each tensor of ``sent`` to its place in ``received``."""
        assert _native is not None
        sizes = [x.nbytes for x in sent]
        digest = blake2b(repr(sizes).encode(), digest_size=16).digest()
        send, receive = _native.WireKind.send, _native.WireKind.receive
        calls = [(send, None, 0, x.data_ptr(), 0, x.nbytes, _BYTES, _SUM) for x in sent]
        calls += [(receive, None, 0, 0, y.data_ptr(), y.nbytes, _BYTES, _SUM) for y in received]
        signature = native_signature(Signature(f"messages of {sizes} bytes to itself", digest))
        self.core.run_calls(signature, calls, self.stream())

    def finish(self) -> None:
        self.core.synchronize(self.stream())

    def fail(self, text: str) -> None:
        """End the world with this failure, as a rank that learns of one does."""
        self.core.fail(Failure("TransportError", 0, text).to_json())


@contextmanager
def self_communicator() -> Iterator[SelfCommunicator]:
    made = SelfCommunicator()
    try:
        yield made
    finally:
        made.core.close(CLOSING_S)


def _library() -> Any:
    found = describe(SETTINGS)
    assert found.nccl is not None, found.nccl_missing
    return found.nccl


def pattern(nbytes: int, seed: int, device: torch.device) -> torch.Tensor:
    """Bytes that differ from one place to the next, and from seed to seed."""
    places = torch.arange(nbytes, dtype=torch.int64, device=device)
    return (places * 31 + seed * 17).remainder_(251).to(torch.uint8)
