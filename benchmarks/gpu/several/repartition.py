"""Repartition of a square matrix from blocks of rows to blocks of columns."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from benchmarks.case import KIB, MIB, Side
from benchmarks.gpu.kernel import equal_to
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.measure import GpuCase
from benchmarks.gpu.several import torchs
from benchmarks.gpu.several.cells import own
from gpudist.ops import Repartition
from gpudist.world.partition import Partition

# Approximate bytes of a rank's block.
SIZES, TINY = {"1 MiB": MIB, "16 MiB": 16 * MIB, "256 MiB": 256 * MIB}, {"1 KiB": KIB}


def cases(ranks: int, tiny: bool = False) -> list[GpuCase]:
    """Return the cases; bytes are a rank's block."""
    found: list[GpuCase] = []
    for name, nbytes in (TINY if tiny else SIZES).items():
        extent = max(1, round((nbytes / 4 / ranks) ** 0.5)) * ranks
        block = 4 * extent * extent // ranks
        found.append(GpuCase("repartition", f"{name} a rank", ranks, block, {"extent": extent}))
    return found


def sides(case: GpuCase, P_world: Partition, machine: Machine) -> dict[str, Side]:
    """Return the sides; torch's all-to-all and messages pack and unpack; DTensor does so itself."""
    extent, n, rank = case.parameters["extent"], P_world.size, P_world.rank or 0
    width = extent // n
    P_x = P_world.create_cartesian_topology_partition([n, 1])
    P_y = P_world.create_cartesian_topology_partition([1, n])
    x, expected = own((extent, extent), P_x), own((extent, extent), P_y)
    repartition, mesh = Repartition(P_x, P_y), torchs.mesh(P_world)

    def all_to_all() -> torch.Tensor:
        packed = x.view(width, n, width).transpose(0, 1).contiguous()
        y = torch.empty_like(packed)
        dist.all_to_all_single(y, packed)
        return y.view(extent, width)

    def messages() -> torch.Tensor:
        y = x.new_empty(extent, width)
        rows, columns = y.split(width), x.split(width, dim=1)
        others = [peer for peer in range(n) if peer != rank]
        torchs.exchange(
            [(peer, columns[peer].contiguous()) for peer in others],
            [(peer, rows[peer]) for peer in others],
        )
        rows[rank].copy_(columns[rank])
        return y

    def by_dtensor() -> torch.Tensor:
        return torchs.redistribute(x, mesh, Shard(0), Shard(1))

    is_right = equal_to(expected)
    return {
        "gpudist": Side(lambda: repartition(x), is_right),
        torchs.named("all_to_all_single", P_world): Side(all_to_all, is_right),
        torchs.named("batch_isend_irecv", P_world): Side(messages, is_right),
        torchs.named("DTensor", P_world): Side(by_dtensor, is_right),
    }
