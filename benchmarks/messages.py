"""Pair exchange: every rank and its partner send each other a message of the same size at once."""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.bound_plan import one_call
from benchmarks.case import KIB, MIB, Case, Side, equals, memory_copy, partner, pattern
from benchmarks.peers import gloo
from benchmarks.rows import MEMORY_COPY
from gpudist.ops import SendRecv, halo_exchange
from gpudist.world.partition import Partition

SIZES = {"4 KiB": 4 * KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "16 MiB": 16 * MIB}


def cases(ranks: int) -> list[Case]:
    """Return the cases; bytes are the size of one message."""
    found = [
        Case(
            "messages", name + (", bare" if bare else ""), ranks, nbytes,
            {"count": nbytes // 4, "bare": bare}, 0 if bare else nbytes,
        )
        for name, nbytes in SIZES.items()
        for bare in (True, False)
    ]  # fmt: skip
    if ranks == 2:
        nbytes = SIZES["4 KiB"]
        found.append(
            Case("messages", "4 KiB, halo", 2, nbytes, {"count": nbytes // 4, "is_halo": True})
        )
    return found


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    """Return the sides.

    Ours: the bound plan's one call, the operator, or the function ``halo_exchange``, which returns
    the own block followed by the partner's. Peer: gloo's isend and irecv.
    """
    gloo.start(P_world)
    rank, count = P_world.rank or 0, case.parameters["count"]
    partners = [partner(rank) for rank in range(P_world.size)]
    P_x = P_world.create_partition_inclusive(range(P_world.size))
    if case.parameters.get("is_halo"):
        return _halo_sides(P_world, count)
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


def _halo_sides(P_world: Partition, count: int) -> dict[str, Side]:
    rank = P_world.rank or 0
    x = torch.from_numpy(pattern(count, rank))
    is_right = equals(np.concatenate([pattern(count, rank), pattern(count, partner(rank))]))
    P_x = P_world.create_cartesian_topology_partition([2])

    def gloo_into_new() -> torch.Tensor:
        y = x.new_empty(2 * count)
        y[:count] = x
        gloo.exchange([(partner(rank), x)], [(partner(rank), y[count:])])
        return y

    return {
        "gpudist": Side(lambda: halo_exchange(x, P_x, halo=[(0, count)], periodic=True), is_right),
        "gloo": Side(gloo_into_new, is_right),
        MEMORY_COPY: memory_copy(4 * count),
    }
