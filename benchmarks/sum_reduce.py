"""Sum-reduce of a block from all ranks to rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.case import (
    Case,
    Side,
    equals,
    is_empty,
    memory_copy,
    pattern,
    pattern_sum,
    round_sizes,
)
from benchmarks.peers import gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import SumReduce
from gpudist.world.partition import Partition


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the size of the block."""
    return round_sizes("sum_reduce", ranks)


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    gloo.start(P_world)
    count = case.parameters["count"]
    x = torch.from_numpy(pattern(count, P_world.rank or 0))
    sum_reduce = SumReduce(P_world, P_world.create_partition_inclusive([0]))

    def gloo_reduce() -> torch.Tensor:
        y = x.clone()  # gloo sums in place, on every rank
        dist.reduce(y, 0)
        return y if P_world.rank == 0 else y[:0]

    is_right = equals(pattern_sum(count, P_world.size)) if P_world.rank == 0 else is_empty
    return {
        "gpudist": Side(lambda: sum_reduce(x), is_right),
        "gloo": Side(gloo_reduce, is_right),
        MEMORY_COPY: memory_copy(case.bytes),
    }
