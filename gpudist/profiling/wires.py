"""The wires of a world: its own, and those among some of its ranks that go with it."""

from __future__ import annotations

from gpudist.transport.base import Transport
from gpudist.transport.nccl import NcclTransport


def wires_of(wire: Transport) -> tuple[Transport, ...]:
    """``wire``, and what is attached to it."""
    attached = wire.attached.values() if isinstance(wire, NcclTransport) else ()
    return (wire, *attached)
