"""Facts by which a rank joins a world, the same for every transport."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class WorldFacts:
    """Argument of :meth:`Transport.connect`.

    Attributes:
        store: rendezvous store.
        rank, size: rank of this process and number of ranks.
        timeout_s: deadline of every wait, in seconds.
        prefix: prefix of the store keys, unique per world.
        look: called in waits; raises the failure of a surrounding world.
        same_node: whether all ranks are on this node.
        interface: network interface between nodes; ``None`` to search for one.
        store_rank: rank whose process hosts the store, or ``None`` if none of them does.
        deterministic: whether sums are bitwise equal over every transport.
        checks: whether ranks compare their plans at every call.
        nccl_library: path of the NCCL library, ``""`` to search for one.
        device_library: path of a replacement for the CUDA driver in tests, ``""`` for CUDA.
        variables: environment of this process.
    """

    store: dist.Store
    rank: int
    size: int
    timeout_s: float
    prefix: str
    look: Callable[[], None]
    same_node: bool
    interface: str | None
    store_rank: int | None
    deterministic: bool
    checks: bool
    nccl_library: str
    device_library: str
    variables: MutableMapping[str, str]
