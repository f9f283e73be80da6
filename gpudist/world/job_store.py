"""The store of a job, in which its ranks meet."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from gpudist.errors import TransportError
from gpudist.world.launch import Launch


def store_of(process_group: dist.ProcessGroup) -> dist.Store:
    """Return the store of a process group of torch."""
    return dist.distributed_c10d._world.pg_map[process_group][1]


def join_store(launch: Launch, timeout: float) -> dist.Store:
    """Connect to the store that the launcher or rank 0 serves; rank 0 starts its own.

    Raises:
        TransportError: the store cannot be reached.
    """
    if launch.size == 1:
        return dist.HashStore()
    try:
        return dist.TCPStore(
            launch.address,
            launch.port,
            world_size=launch.size,
            is_master=launch.rank == 0 and not launch.store_is_served,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        remedy = (
            "if another job uses this port, end it or set another MASTER_PORT"
            if launch.rank == 0 and not launch.store_is_served
            else "check that rank 0 is running, and MASTER_ADDR and MASTER_PORT"
        )
        raise TransportError(
            f"rank {launch.rank} cannot meet the others at {launch.address}:{launch.port}: "
            f"{error}; {remedy}"
        ) from error


def leave_store(store: dist.Store, launch: Launch, patience_s: float) -> None:
    """Report that this rank has closed; rank 0, which serves the store, waits for the others."""
    key = f"gpudist/{launch.run}/closed"
    deadline_s = time.monotonic() + patience_s
    store.add(key, 1)
    while launch.rank == 0 and time.monotonic() < deadline_s:
        if store.add(key, 0) >= launch.size:
            break
        time.sleep(0.02)
