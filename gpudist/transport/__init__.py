"""Transports: NCCL, shared memory, gloo, loopback and dry runs behind one protocol."""

from gpudist.transport.base import Transport
from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host.transport import HostTransport
from gpudist.transport.loopback import LoopbackTransport
from gpudist.transport.nccl.transport import NcclTransport

TRANSPORTS: dict[str, type[Transport]] = {
    kind.name: kind for kind in (NcclTransport, HostTransport, GlooTransport, LoopbackTransport)
}
"""Transports by the name that users read and set."""
