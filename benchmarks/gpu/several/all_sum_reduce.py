"""Sum of every rank's block on all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate

from benchmarks.case import Side
from benchmarks.gpu.kernel import equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several import torchs
from benchmarks.gpu.several.broadcast import sizes
from benchmarks.gpu.several.cells import line
from benchmarks.gpu.several.sum_reduce import total
from gpudist.ops import AllSumReduce
from gpudist.world.partition import Partition


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the size of the block."""
    return sizes("all_sum_reduce", ranks, tiny)


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    count = case.parameters["count"]
    x = line(count, P_world.device, P_world.rank or 0)
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    all_sum_reduce, mesh = AllSumReduce(P_x, [0]), torchs.mesh(P_world)

    def by_torch() -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def by_dtensor() -> torch.Tensor:
        return torchs.redistribute(x, mesh, Partial(), Replicate())

    is_right = equal_to(total(count, P_world))
    return {
        "gpudist": Side(lambda: all_sum_reduce(x), is_right),
        torchs.named("all_reduce", P_world): Side(by_torch, is_right),
        torchs.named("DTensor", P_world): Side(by_dtensor, is_right),
    }
