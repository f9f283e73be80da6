"""A partition whose messages the host can read as soon as they have come.

Over shared memory, gloo and loopback that is any partition. Over NCCL it is one of the same workers
over a wire of its own: shared memory on one node, gloo between nodes. A header goes over it, so
that nothing waits for the GPU.
"""

from __future__ import annotations

import logging

from gpudist.transport.base import Transport
from gpudist.transport.gloo import GlooTransport
from gpudist.transport.host.meeting import NotOneNode
from gpudist.transport.host.transport import HostTransport
from gpudist.transport.nccl.transport import NcclTransport
from gpudist.world.partition import Partition

logger = logging.getLogger("gpudist")


def host_partition(P: Partition) -> Partition:
    """The members of ``P``, in their order, over a wire that carries tensors on the CPU.

    Collective over the members the first time, if ``P`` is over NCCL; ranks over the other wire are
    positions in ``P``. It ends with ``P``'s wire, when that is closed or aborted.
    """
    wire = P.wire
    if not isinstance(wire, NcclTransport) or P.rank is None or P.size == 1:
        return P
    if P.ranks not in wire.attached:
        made = wire.attached[P.ranks] = _connect(P, wire, P.rank)
        made.recorder.observers = wire.recorder.observers
    return Partition(wire.attached[P.ranks], range(P.size))


def _connect(P: Partition, wire: NcclTransport, rank: int) -> Transport:
    prefix = f"{wire.prefix}/host/{Partition(wire, P.ranks).digest.hex()}"
    store_rank = P.ranks.index(wire.store_rank) if wire.store_rank in P.ranks else None
    if wire.same_node:
        try:
            return HostTransport(
                wire.store, rank, P.size, wire.timeout_s, prefix=prefix, store_rank=store_rank,
                look=wire.look,
            )  # fmt: skip
        except NotOneNode as error:
            logger.warning("using gloo beside nccl: %s", error)
            prefix = f"{prefix}/apart"
    return GlooTransport(
        wire.store, rank, P.size, wire.timeout_s, prefix=prefix, same_node=False,
        interface=wire.interface, store_rank=store_rank, look=wire.look,
    )  # fmt: skip
