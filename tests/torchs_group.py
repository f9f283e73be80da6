"""Torch's own default process group, beside a world of the same workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gpudist.world.partition import Partition


@contextmanager
def torchs_group(P_world: Partition, store_path: str, rank: int | None = None) -> Iterator[None]:
    """Torch's group inside the ``with`` statement.

    Args:
        store_path: of a file that is not there yet, the same on all ranks.
        rank: of this worker in the group; its rank in the world unless given.
    """
    store = dist.FileStore(store_path, P_world.size)
    rank = P_world.rank if rank is None else rank
    dist.init_process_group("gloo", store=store, rank=rank or 0, world_size=P_world.size)
    try:
        yield
        # A rank that has its connections and leaves would end those that others still make.
        dist.barrier()
    finally:
        dist.destroy_process_group()
