"""Pair exchange: ranks 0 and 1 send each other a message of the same size at once."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.harness import Row, alternate, row, start_gloo
from gpudist.ops import SendRecv
from gpudist.partition import Partition

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}


def measure(P_world: Partition, iterations: int) -> list[Row]:
    """Ours: one movement with a new output. Peer: gloo's isend and irecv into existing memory."""
    start_gloo(P_world)
    pair = P_world.create_partition_inclusive([0, 1])
    swapped = P_world.create_partition_inclusive([1, 0])
    rank = P_world.rank or 0
    rows: list[Row] = []
    for case, nbytes in SIZES.items():
        x = torch.full((nbytes,), rank + 1, dtype=torch.uint8)
        received = torch.zeros(nbytes, dtype=torch.uint8)
        swap = SendRecv(pair, swapped)

        def ours(swap: SendRecv = swap, x: torch.Tensor = x) -> torch.Tensor:
            return swap(x)

        def gloo(x: torch.Tensor = x, received: torch.Tensor = received) -> None:
            if rank > 1:
                return
            receive = dist.irecv(received, 1 - rank)
            send = dist.isend(x, 1 - rank)
            assert receive is not None and send is not None
            receive.wait()
            send.wait()

        expected = torch.full_like(x, 2 - rank) if rank < 2 else x
        correct = torch.equal(ours(), expected)
        (wrong,) = P_world.allreduce_data([int(not correct)])
        # Many calls a sample, for both alike: one alone is mostly the skew with which ranks begin.
        calls = min(256, max(8, (32 << 20) // nbytes))
        ours_us, gloo_us = alternate(P_world, [ours, gloo], calls, iterations)
        rows.append(
            row("messages", case, P_world.size, nbytes, ours_us, "gloo", gloo_us, not wrong)
        )
    return rows
