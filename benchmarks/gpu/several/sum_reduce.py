"""Sum of every rank's block on rank 0."""

from __future__ import annotations

from functools import reduce

import torch
import torch.distributed as dist

from benchmarks.case import Side
from benchmarks.gpu.kernel import equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several import torchs
from benchmarks.gpu.several.broadcast import sizes
from benchmarks.gpu.several.cells import line
from gpudist.ops import SumReduce
from gpudist.world.partition import Partition


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are the size of the block."""
    return sizes("sum_reduce", ranks, tiny)


def total(count: int, P_world: Partition) -> torch.Tensor:
    """Return the sum of all ranks' blocks, each of which has its rank as seed."""
    blocks = (line(count, P_world.device, rank) for rank in range(P_world.size))
    return reduce(torch.Tensor.add_, blocks)


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    count, is_root = case.parameters["count"], P_world.rank == 0
    x = line(count, P_world.device, P_world.rank or 0)
    sum_reduce = SumReduce(P_world, P_world.create_partition_inclusive([0]))
    # Torch does not define the result on the other ranks.
    expected = equal_to(total(count, P_world))

    def by_torch() -> torch.Tensor:
        y = x.clone()
        dist.reduce(y, 0)
        return y

    return {
        "gpudist": Side(lambda: sum_reduce(x), lambda y: expected(y) if is_root else not y.numel()),
        torchs.named("reduce", P_world): Side(by_torch, lambda y: expected(y) or not is_root),
    }
