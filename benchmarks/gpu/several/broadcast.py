"""Broadcast of a block from rank 0 to all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.case import KIB, MIB, Side
from benchmarks.gpu.kernel import equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several import torchs
from benchmarks.gpu.several.cells import line
from gpudist.ops import Broadcast, zero_volume_tensor
from gpudist.world.partition import Partition

SIZES = {"64 KiB": 64 * KIB, "4 MiB": 4 * MIB, "256 MiB": 256 * MIB}
TINY = {"16 B": 16, "4 KiB": 4 * KIB}


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the size of the block."""
    return sizes("broadcast", ranks, tiny)


def sizes(subject: str, ranks: int, tiny: bool) -> list[GpuCase]:
    """Return cases with blocks of float32."""
    return [
        GpuCase(subject, name, ranks, nbytes, {"count": nbytes // 4})
        for name, nbytes in (TINY if tiny else SIZES).items()
    ]


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    block = line(case.parameters["count"], P_world.device)
    is_root = P_world.rank == 0
    x = block if is_root else zero_volume_tensor(dtype=block.dtype, device=block.device)
    broadcast = Broadcast(P_world.create_partition_inclusive([0]), P_world)

    def by_torch() -> torch.Tensor:
        y = block.clone() if is_root else torch.empty_like(block)
        dist.broadcast(y, 0)
        return y

    is_right = equal_to(block.clone())
    return {
        "gpudist": Side(lambda: broadcast(x), is_right),
        torchs.named("broadcast", P_world): Side(by_torch, is_right),
    }
