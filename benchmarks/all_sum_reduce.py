"""All-sum-reduce: the sum of every rank's block, on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.case import Case, Side, equals, memory_copy, pattern, pattern_sum, round_sizes
from benchmarks.peers import gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import AllSumReduce
from gpudist.world.partition import Partition


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the size of the block."""
    return round_sizes("all_sum_reduce", ranks)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    gloo.start(P_world)
    count = case.parameters["count"]
    x = torch.from_numpy(pattern(count, P_world.rank or 0))
    P_x = P_world.create_cartesian_topology_partition([P_world.size])
    all_sum_reduce = AllSumReduce(P_x, [0])

    def gloo_all_reduce() -> torch.Tensor:
        y = x.clone()  # gloo sums in place
        dist.all_reduce(y)
        return y

    is_right = equals(pattern_sum(count, P_world.size))
    return {
        "gpudist": Side(lambda: all_sum_reduce(x), is_right),
        "gloo": Side(gloo_all_reduce, is_right),
        MEMORY_COPY: memory_copy(case.bytes),
    }
