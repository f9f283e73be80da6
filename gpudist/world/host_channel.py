"""Partition whose messages are received in host memory.

Over shared memory, gloo and loopback, this is the partition itself. Over NCCL, it is a second
partition of the same workers over another transport: shared memory on one node, gloo between nodes.
Message headers use it, so that sending a header never waits for the GPU.
"""

from __future__ import annotations

from gpudist.world.partition import Partition


def host_partition(P: Partition) -> Partition:
    """Return a partition of the same members over a transport for CPU tensors.

    If ``P`` is over NCCL, the first call is collective over its members, and ranks of the second
    transport are positions in ``P``. That transport is closed or aborted together with the
    transport of ``P``.
    """
    if P.rank is None or P.size == 1:
        return P
    wire = P.wire.host_wire(P.ranks)
    return P if wire is P.wire else Partition(wire, range(P.size))
