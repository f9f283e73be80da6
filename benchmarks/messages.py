"""Pair exchange: every rank and its partner send each other a message of the same size at once."""

from __future__ import annotations

import torch

from benchmarks.bound_plan import one_call
from benchmarks.case import KIB, MIB, Case, Side, equals, memory_copy, partner, pattern
from benchmarks.peers import gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import SendRecv
from gpudist.world.partition import Partition

SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the size of one message."""
    return [
        Case(
            "messages", name + (", bare" if bare else ""), ranks, nbytes,
            {"count": nbytes // 4, "bare": bare}, 0 if bare else nbytes,
        )
        for name, nbytes in SIZES.items()
        for bare in (True, False)
    ]  # fmt: skip


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides.

    Ours: the bound plan's one call, or the operator. Peer: gloo's isend and irecv.
    """
    gloo.start(P_world)
    rank, count = P_world.rank or 0, case.parameters["count"]
    partners = [partner(rank) for rank in range(P_world.size)]
    P_x = P_world.create_partition_inclusive(range(P_world.size))
    swap = SendRecv(P_x, P_world.create_partition_inclusive(partners))
    x = torch.from_numpy(pattern(count, rank))
    is_right = equals(pattern(count, partner(rank)))
    y, z = torch.empty_like(x), torch.empty_like(x)

    def gloo_into(y: torch.Tensor) -> torch.Tensor:
        gloo.exchange([(partner(rank), x)], [(partner(rank), y)])
        return y

    if case.parameters["bare"]:
        return {
            "gpudist": Side(one_call(swap.movement(x), x, y), is_right, y.zero_),
            "gloo bare": Side(lambda: gloo_into(z), is_right, z.zero_),
            MEMORY_COPY: memory_copy(case.bytes),
        }
    return {
        "gpudist": Side(lambda: swap(x), is_right),
        "gloo": Side(lambda: gloo_into(torch.empty_like(x)), is_right),
        MEMORY_COPY: memory_copy(case.bytes),
    }
