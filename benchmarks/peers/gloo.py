"""gloo, by torch.distributed, in the processes of our own ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from gpudist.world.partition import Partition


def start(P_world: Partition) -> None:
    """Make torch.distributed's default group over gloo among the ranks of ``P_world``, once."""
    if dist.is_initialized():
        return
    rank, size = P_world.rank, P_world.size
    assert rank is not None
    store = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (port,) = P_world.broadcast_data([store.port] if store is not None else None)
    if store is None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def exchange(
    sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
) -> None:
    """Send and receive contiguous tensors, all in flight at once."""
    works = [dist.irecv(buffer, peer) for peer, buffer in receives]
    works += [dist.isend(buffer, peer) for peer, buffer in sends]
    for work in works:
        assert work is not None
        work.wait()
