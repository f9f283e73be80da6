"""The operators without a file of their own: scatter, gather, all-gather, sum-scatter, shift."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from benchmarks.case import KIB, MIB, Case, Side, equals, is_empty, memory_copy, pattern
from benchmarks.peers import dtensor, gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import AllGather, Gather, Scatter, Shift, SumScatter, zero_volume_tensor
from gpudist.world.partition import Partition

OPERATORS = ("scatter", "gather", "all_gather", "sum_scatter", "shift")
SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the whole tensor, all ranks' blocks together."""
    return [
        Case(
            "operators", f"{operator}, {name}", ranks, nbytes,
            {"operator": operator, "count": nbytes // 4},
            nbytes if "gather" in operator else nbytes // ranks,
        )
        for operator in OPERATORS
        for name, nbytes in SIZES.items()
    ]  # fmt: skip


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides.

    Peers: gloo's collective of the same name; DTensor for symmetric operators.
    """
    gloo.start(P_world)
    found = _SIDES[case.parameters["operator"]](case.parameters["count"], P_world)
    return {**found, MEMORY_COPY: memory_copy(case.bytes)}


def _scatter(count: int, P_world: Partition) -> dict[str, Side]:
    size, rank = P_world.size, P_world.rank or 0
    whole = torch.from_numpy(pattern(count, 0))
    x = whole if rank == 0 else zero_volume_tensor()
    scatter = Scatter(P_world.create_cartesian_topology_partition([size]), shape="static")

    def by_gloo() -> torch.Tensor:
        y = torch.empty(count // size)
        dist.scatter(y, list(whole.chunk(size)) if rank == 0 else None, 0)
        return y

    is_right = equals(whole.chunk(size)[rank].numpy())
    return {"gpudist": Side(lambda: scatter(x), is_right), "gloo": Side(by_gloo, is_right)}


def _gather(count: int, P_world: Partition) -> dict[str, Side]:
    size, rank = P_world.size, P_world.rank or 0
    whole = torch.from_numpy(pattern(count, 0))
    x = whole.chunk(size)[rank].clone()
    gather = Gather(P_world.create_cartesian_topology_partition([size]), shape="static")

    def by_gloo() -> torch.Tensor:
        y = torch.empty(count if rank == 0 else 0)
        dist.gather(x, list(y.chunk(size)) if rank == 0 else None, 0)
        return y

    is_right = equals(whole.numpy()) if rank == 0 else is_empty
    return {"gpudist": Side(lambda: gather(x), is_right), "gloo": Side(by_gloo, is_right)}


def _all_gather(count: int, P_world: Partition) -> dict[str, Side]:
    size, rank = P_world.size, P_world.rank or 0
    whole = torch.from_numpy(pattern(count, 0))
    x = whole.chunk(size)[rank].clone()
    all_gather = AllGather(P_world.create_cartesian_topology_partition([size]), [0])

    def by_gloo() -> torch.Tensor:
        y = torch.empty(count)
        dist.all_gather_into_tensor(y, x)
        return y

    is_right = equals(whole.numpy())
    return {
        "gpudist": Side(lambda: all_gather(x), is_right),
        "gloo": Side(by_gloo, is_right),
        "dtensor": Side(_by_dtensor(x, P_world, Shard(0), Replicate()), is_right),
    }


def _sum_scatter(count: int, P_world: Partition) -> dict[str, Side]:
    size, rank = P_world.size, P_world.rank or 0
    parts = [torch.from_numpy(pattern(count, seed)) for seed in range(size)]
    x = parts[rank]
    sum_scatter = SumScatter(P_world.create_cartesian_topology_partition([size]), [0])

    def by_gloo() -> torch.Tensor:
        y = torch.empty(count // size)
        dist.reduce_scatter_tensor(y, x)
        return y

    is_right = equals(torch.stack(parts).sum(0).chunk(size)[rank].numpy())
    return {
        "gpudist": Side(lambda: sum_scatter(x), is_right),
        "gloo": Side(by_gloo, is_right),
        "dtensor": Side(_by_dtensor(x, P_world, Partial(), Shard(0)), is_right),
    }


def _shift(count: int, P_world: Partition) -> dict[str, Side]:
    size, rank = P_world.size, P_world.rank or 0
    blocks = [torch.from_numpy(pattern(count // size, seed)) for seed in range(size)]
    x = blocks[rank]
    shift = Shift(P_world.grid(size), [1])
    sender, receiver = (rank - 1) % size, (rank + 1) % size

    def by_gloo() -> torch.Tensor:
        y = torch.empty_like(x)
        messages = [dist.P2POp(dist.isend, x, receiver), dist.P2POp(dist.irecv, y, sender)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()
        return y

    is_right = equals(blocks[sender].numpy())
    return {"gpudist": Side(lambda: shift(x), is_right), "gloo": Side(by_gloo, is_right)}


def _by_dtensor(
    x: torch.Tensor, P_world: Partition, source: Placement, target: Placement
) -> Callable[[], torch.Tensor]:
    mesh = dtensor.mesh(P_world)
    return lambda: dtensor.redistribute(x, mesh, source, target)


_SIDES: dict[str, Callable[[int, Partition], dict[str, Side]]] = {
    "scatter": _scatter,
    "gather": _gather,
    "all_gather": _all_gather,
    "sum_scatter": _sum_scatter,
    "shift": _shift,
}
