"""Periodic halos in a world of one, for the dtypes with the slowest interiors: for a profiler."""

from __future__ import annotations

import torch

from gpudist import halo_exchange
from gpudist.world.partition import Partition
from tests.gpu.worlds import OneRank

SHAPE = (1, 4, 256, 256, 256)
DTYPES = (torch.float32, torch.bfloat16)


def exchanged(P_world: Partition) -> None:
    P_x = P_world.create_cartesian_topology_partition([1] * len(SHAPE))
    for dtype in DTYPES:
        x = torch.ones(SHAPE, dtype=dtype, device=P_world.device)
        for _ in range(3):
            halo_exchange(x, P_x, halo=((0, 0), (0, 0), *((1, 1),) * 3), periodic=True)
    P_world.wire.wait()


if __name__ == "__main__":
    world = OneRank()
    world.run(exchanged)
    world.close()
