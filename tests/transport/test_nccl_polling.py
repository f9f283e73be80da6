"""How often a world launches kernels and queries events, over the doubles of CUDA and NCCL."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import torch

from gpudist import ops, zero_volume_tensor
from gpudist.exchange import start
from gpudist.transport.base import Signature, Transport
from gpudist.transport.failure.channel import Failure
from gpudist.world import runtime
from gpudist.world.partition import Partition
from tests.doubles.nccl import clear, count, inject, violations
from tests.transport.nccl_actions import block_of, halo, halo_of
from tests.transport.worlds import results

RANKS = 3
CELLS = 90_000
PERIOD_S = 0.5


def broadcast(P_world: Partition) -> torch.Tensor:
    root = P_world.create_partition_inclusive([0])
    x = torch.arange(float(CELLS)) if root.active else zero_volume_tensor()
    return ops.broadcast(x, root, P_world, global_shape=[CELLS])


def all_sum_reduce(P_world: Partition) -> torch.Tensor:
    P_x = P_world.create_cartesian_topology_partition([RANKS])
    return ops.all_sum_reduce(torch.arange(float(CELLS)), P_x, [0])


def gather_rows(P_world: Partition) -> torch.Tensor:
    """Blocks arrive where they stay."""
    P_x = P_world.create_cartesian_topology_partition([RANKS, 1])
    return ops.all_gather(torch.ones(CELLS // 90, 90), P_x, [0])


def broadcast_verb(P_world: Partition) -> torch.Tensor:
    x = torch.full((CELLS,), float(P_world.wire.rank))
    with P_world.wire.group(Signature("a verb", bytes(16))):
        P_world.communicator.broadcast(x, 1)
    P_world.wire.wait()
    return x


def all_reduce_verb(P_world: Partition) -> torch.Tensor:
    x, y = torch.ones(CELLS), torch.empty(CELLS)
    with P_world.wire.group(Signature("another verb", bytes(16))):
        P_world.communicator.all_reduce(x, y)
    P_world.wire.wait()
    return y


ACTIONS: dict[str, Callable[[Partition], torch.Tensor]] = {
    action.__name__: action
    for action in (
        broadcast, all_sum_reduce, gather_rows, broadcast_verb, all_reduce_verb, halo,
    )
}  # fmt: skip


def launches(transport: Transport, name: str) -> dict[str, int]:
    """Return the counts of one call of an action after everything is bound."""
    P_world, action = runtime.world_of(transport), ACTIONS[name]
    clear()
    expected = action(P_world)
    names = ("launch_combine", "wide_launch_that_only_looks", "copy")
    before = {counted: count(counted) for counted in names}
    found = action(P_world)
    after = {counted: count(counted) - before[counted] for counted in names}
    assert torch.equal(found, expected)
    assert violations() == []
    return after


@pytest.mark.parametrize("name", ACTIONS)
def test_no_large_launch_only_looks_for_a_failure(name: str) -> None:
    """One block is enough where the output is complete already."""
    for counted in results("nccl", RANKS, launches, name):
        assert counted["wide_launch_that_only_looks"] == 0, counted
        assert counted["launch_combine"] <= 2, counted
        assert counted["copy"] == 0, counted


def halo_launches(transport: Transport, grid: tuple[int, ...]) -> list[int]:
    """Return the launches of a halo exchange and of its adjoint, and the copies of both."""
    P_x = runtime.world_of(transport).create_cartesian_topology_partition([1, *grid])
    halo = ops.HaloExchange(P_x, halo=[(1, 1)] * len(grid))
    clear()
    counts = []
    for _ in range(2):  # the first call binds
        x = torch.ones([2] + [6] * len(grid), requires_grad=True)
        before, copied = count("launch_combine"), count("copy")
        y = halo(x)
        between = count("launch_combine")
        y.sum().backward()
        counts = [between - before, count("launch_combine") - between]
        counts.append(count("copy") - copied)
    assert violations() == []
    return counts


@pytest.mark.parametrize("grid", [(2, 1, 1), (2, 2, 1)])
def test_ghosts_and_the_own_block_are_written_by_one_launch(grid: tuple[int, ...]) -> None:
    """The first launch packs; the second writes the padded block, or adds all of an adjoint."""
    for counts in results("nccl", math.prod(grid), halo_launches, grid):
        assert counts[0] <= 2 and counts[1] <= 2 and counts[2] == 0, counts


def questions(transport: Transport, in_flight: int) -> int:
    """About events, in a period in which operators hang."""
    P_world = runtime.world_of(transport)
    clear()
    halo(P_world)
    x = block_of(P_world)
    movement = halo_of(P_world).movement(x)
    inject("stall")
    started = [start([movement], [x]) for _ in range(in_flight)]
    before = count("query_event")
    time.sleep(PERIOD_S)
    asked = count("query_event") - before
    transport.abort(Failure("TransportError", transport.rank, "enough"))
    for one in started:
        with pytest.raises(Exception, match="enough"):
            one.wait(0)
    clear()
    return asked


def test_questions_do_not_grow_with_the_operators_in_flight() -> None:
    few = max(results("nccl", RANKS, questions, 2))
    many = max(results("nccl", RANKS, questions, 40))
    assert many <= 2 * few + 10, (few, many)
