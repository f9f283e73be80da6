"""Creation of plans, without messages or peers. All processes plan at once."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from benchmarks.case import Case, Side
from gpudist.geometry import (
    Decomposition,
    Halo,
    HaloWidths,
    Plan,
    SlidingWindow,
    plan_halo,
    plan_repartition,
)
from gpudist.geometry.cartesian import index_of, rank_of
from gpudist.world.partition import Partition

EXTENT = 64  # cells of a block, in each spatial dim


def cases(ranks: int) -> list[Case]:
    """Return the cases; nothing is sent, so bytes are 0."""
    return [
        Case("planning", name, ranks, 0, {"number": number}) for number, name in enumerate(_SIDES)
    ]


def sides(case: Case, P_world: Partition) -> dict[str, Side]:
    return {"gpudist": _SIDES[case.name](P_world)}


def _halo_of(grid_extent: int) -> Callable[[tuple[int, ...]], Plan]:
    grid = (1, 1, grid_extent, grid_extent, grid_extent)
    inputs = Decomposition.balanced((1, 1, *(n * EXTENT for n in grid[2:])), grid)
    halo = Halo((HaloWidths(), HaloWidths(), *[SlidingWindow(3, padding=(1, 1))] * 3))
    return lambda index: plan_halo(inputs, halo, index)


def _halo_one(grid_extent: int) -> Side:
    """Plan a rank in the middle: 26 neighbours, whose messages are the cells around its block."""
    plan_for = _halo_of(grid_extent)
    index = (0, 0, *[grid_extent // 2] * 3)
    around = (EXTENT + 2) ** 3 - EXTENT**3

    def is_right(plan: Plan) -> bool:
        (stage,) = plan.stages
        received = sum(message.volume for message in stage.receives)
        sent = sum(message.volume for message in stage.sends)
        return len(stage.receives) == len(stage.sends) == 26 and received == sent == around

    return Side(lambda: plan_for(index), is_right)


def _halo_all(P_world: Partition) -> Side:
    """Plan every rank of 16^3, divided among the processes; each sends what it receives."""
    plan_for = _halo_of(16)
    grid = (1, 1, 16, 16, 16)
    indices = [index_of(rank, grid) for rank in range(P_world.rank or 0, prod(grid), P_world.size)]

    def is_right(plans: list[Plan]) -> bool:
        for plan, index in zip(plans, indices, strict=True):
            (stage,) = plan.stages
            sent = {message.peer: message.volume for message in stage.sends}
            received = {message.peer: message.volume for message in stage.receives}
            peers = prod(2 + (0 < i < 15) for i in index[2:]) - 1
            if sent != received or len(sent) != peers:
                return False
        return True

    return Side(lambda: [plan_for(index) for index in indices], is_right)


def _repartition_one() -> Side:
    """Plan a rank of [64, 64] to [4096, 1]: its 64 blocks of rows go to 64 ranks, one to itself."""
    shape, source_grid, target_grid = (8192, 8192), (64, 64), (4096, 1)
    source = Decomposition.balanced(shape, source_grid)
    target = Decomposition.balanced(shape, target_grid)
    rank = 2080
    arguments: tuple[Any, ...] = (
        source, target, rank, index_of(rank, source_grid), index_of(rank, target_grid),
        lambda index: rank_of(index, source_grid), lambda index: rank_of(index, target_grid),
    )  # fmt: skip

    def is_right(plan: Plan) -> bool:
        (stage,) = plan.stages
        kept = sum(move.source.volume for move in stage.moves)
        sent = sum(message.volume for message in stage.sends) + kept
        received = sum(message.volume for message in stage.receives) + kept
        return sent == received == prod(shape) // 4096 and len(stage.sends) + bool(kept) == 64

    return Side(lambda: plan_repartition(*arguments), is_right)


_SIDES: dict[str, Callable[[Partition], Side]] = {
    "halo 3x3x3, one rank of 16^3": lambda _: _halo_one(16),
    "halo 3x3x3, one rank of 64^3": lambda _: _halo_one(64),
    "halo 3x3x3, all 4096 ranks of 16^3, shared out": _halo_all,
    "repartition [64,64] to [4096,1], one rank": lambda _: _repartition_one(),
}
