"""Repartition of a square matrix from blocks of rows to blocks of columns."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from benchmarks.case import KIB, MIB, Case, Side, equals, memory_copy, pattern
from benchmarks.peers import dtensor, gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import Repartition
from gpudist.world.partition import Partition

EXTENTS = {"64 KiB": 128, "4 MiB": 1024, "64 MiB": 4096}


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are a rank's block."""
    return [
        Case(
            "repartition", f"{name} global, {_size(n * n * 4 // ranks)} a rank", ranks,
            n * n * 4 // ranks, {"n": n}, n * n * 4 // ranks,
        )
        for name, n in EXTENTS.items()
    ]  # fmt: skip


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides. Peers: gloo's isend and irecv with packing, and DTensor over gloo."""
    mesh = dtensor.mesh(P_world)
    n, size, rank = case.parameters["n"], P_world.size, P_world.rank or 0
    width = n // size
    whole = torch.from_numpy(pattern(n * n, 0)).view(n, n)
    x = whole[rank * width : (rank + 1) * width].clone()
    repartition = Repartition(
        P_world.create_cartesian_topology_partition([size, 1]),
        P_world.create_cartesian_topology_partition([1, size]),
    )

    def gloo_repartition() -> torch.Tensor:
        y = torch.empty(n, width)
        rows, columns = y.split(width), x.split(width, dim=1)
        others = [peer for peer in range(size) if peer != rank]
        # A block of rows of y is contiguous and is received in place.
        gloo.exchange(
            [(peer, columns[peer].contiguous()) for peer in others],
            [(peer, rows[peer]) for peer in others],
        )
        rows[rank].copy_(columns[rank])
        return y

    is_right = equals(whole[:, rank * width : (rank + 1) * width].numpy().copy())
    return {
        "gpudist": Side(lambda: repartition(x), is_right),
        "gloo": Side(gloo_repartition, is_right),
        "dtensor": Side(lambda: dtensor.redistribute(x, mesh, Shard(0), Shard(1)), is_right),
        MEMORY_COPY: memory_copy(case.bytes),
    }
