"""Broadcast of a block from rank 0 to all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.case import Case, Side, equals, memory_copy, pattern, round_sizes
from benchmarks.peers import gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import Broadcast, zero_volume_tensor
from gpudist.world.partition import Partition


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the size of the block."""
    return round_sizes("broadcast", ranks)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    gloo.start(P_world)
    count = case.parameters["count"]
    is_root = P_world.rank == 0
    block = torch.from_numpy(pattern(count, 0))
    x = block if is_root else zero_volume_tensor()
    broadcast = Broadcast(P_world.create_partition_inclusive([0]), P_world)

    def gloo_broadcast() -> torch.Tensor:
        y = block.clone() if is_root else torch.empty(count)
        dist.broadcast(y, 0)
        return y

    is_right = equals(pattern(count, 0))
    return {
        "gpudist": Side(lambda: broadcast(x), is_right),
        "gloo": Side(gloo_broadcast, is_right),
        MEMORY_COPY: memory_copy(case.bytes),
    }
