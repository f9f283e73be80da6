"""Misuse is a typed error with the numbers in it, on every rank, and never a hang."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpudist import nn, ops
from gpudist.errors import GpudistError, PartitionError, PlanMismatch, ShapeError
from gpudist.world.partition import Partition
from tests.ops.dense import compare_every_call
from tests.pool import distributed


def grid(P_world: Partition, *shape: int) -> Any:
    return P_world.create_cartesian_topology_partition(shape)


MISUSES: dict[str, tuple[Callable[[Partition], object], type[GpudistError], str]] = {
    "source does not broadcast": (
        lambda P: ops.Broadcast(P.create_partition_inclusive([0, 1]), P),
        PartitionError,
        r"^Broadcast: P_x of shape \[2\] does not broadcast to P_y of shape \[4\]: axis 0 of P_x ",
    ),
    "destination may not be one": (
        lambda P: ops.Broadcast(P, P.create_partition_inclusive([0])),
        PartitionError,
        r"\[4\] does not broadcast .*\[1\]",
    ),
    "transposed does not broadcast": (
        lambda P: ops.Broadcast(grid(P, 1, 4), grid(P, 1, 4), transpose_src=True),
        PartitionError,
        r"\[1, 4\] \(transposed\) does not broadcast .*\[1, 4\]",
    ),
    "sum does not fit": (
        lambda P: ops.SumReduce(grid(P, 2, 2), P.create_partition_inclusive([0, 1, 2])),
        PartitionError,
        r"^SumReduce: P_x of shape \[2, 2\] does not reduce to P_y of shape \[3\]: axis 1 of P_y "
        r"is 3 and of P_x 2, counted in \[1, 3\] and \[2, 2\]; each axis of P_y must be 1 ",
    ),
    "sum does not fit transposed": (
        lambda P: ops.SumReduce(grid(P, 4, 1), grid(P, 4, 1), transpose_dest=True),
        PartitionError,
        r"^SumReduce: P_x of shape \[4, 1\] does not reduce to P_y of .* \[4, 1\] \(transposed\)",
    ),
    "sum of fewer axes": (
        lambda P: ops.SumReduce(P, grid(P, 2, 2)),
        PartitionError,
        r"^SumReduce: .* does not reduce to P_y of shape \[2, 2\]: P_y has 2 axes and P_x 1",
    ),
    "halo of many turns": (
        lambda P: ops.HaloExchange(grid(P, 4), halo=[(10**9, 0)], periodic=True)(torch.ones(2)),
        ShapeError,
        r"^HaloExchange, dim 0: a halo of 1000000000 cells is more than 100 times as wide as the "
        r"global extent 8; pass narrower widths$",
    ),
    "duplicate rank": (
        lambda P: P.create_partition_inclusive([0, 2, 0]),
        PartitionError,
        r"ranks \[0\] .*more than once in \[0, 2, 0\]",
    ),
    "rank out of range": (
        lambda P: P.create_partition_inclusive([1, 4, -1]),
        PartitionError,
        r"ranks \[-1, 4\] .* 4 workers \(0 to 3\)",
    ),
    "no rank": (lambda P: P.create_partition_inclusive([]), PartitionError, "empty"),
    "grid of another size": (
        lambda P: grid(P, 2, 3),
        PartitionError,
        r"\[2, 3\] holds 6 workers .* has 4",
    ),
    "axis out of range": (
        lambda P: ops.all_sum_reduce(torch.ones(2), grid(P, 2, 2), [2]),
        PartitionError,
        r"axes \[2\] .*2 axes",
    ),
    "axis named twice": (
        lambda P: ops.all_sum_reduce(torch.ones(2), grid(P, 2, 2), [1, -1]),
        PartitionError,
        r"\[1, -1\] name an axis more than once",
    ),
    "root out of range": (
        lambda P: ops.scatter(torch.ones(4), grid(P, 4), root=4),
        PartitionError,
        r"\[4\] .* 4 workers",
    ),
    "other number of axes": (
        lambda P: ops.repartition(torch.ones(2, 2), grid(P, 2, 2), P),
        PartitionError,
        r"\[2, 2\] and P_y \[4\]",
    ),
    "other number of dims": (
        lambda P: ops.repartition(torch.ones(2, 2, 3), grid(P, 2, 2), grid(P, 4, 1)),
        ShapeError,
        r"\[2, 2, 3\] has 3 dims, not 2",
    ),
    "too many dims": (
        lambda P: ops.broadcast(torch.ones([1] * 10), P, P),
        ShapeError,
        "at most 8",
    ),
    "batch that is not cut": (
        lambda P: ops.all_gather(torch.ones(2 + (P.rank == 1), 3), grid(P, 2, 2), [0]),
        ShapeError,
        r"do not form one tensor.*\[3, 3\]",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
@distributed(ranks=4)
def test_misuse_on_every_rank(P_world: Partition, name: str) -> None:
    call, kind, text = MISUSES[name]
    with pytest.raises(kind, match=text):
        call(P_world)
    # Refused before the first message: the world goes on.
    P_world.barrier()


@distributed(ranks=4)
def test_more_bytes_than_any_memory(P_world: Partition) -> None:
    layer = nn.DistributedConstantPad1d(grid(P_world, 1, 1, 4), (2**62, 0), 0.0)
    with pytest.raises(
        ShapeError, match=r": a block of the result would have shape \[1, 1, \d{19}\]"
    ):
        layer(torch.ones(1, 1, 2))


OPERATORS: dict[str, Callable[[torch.Tensor, Partition], object]] = {
    "halo_exchange": lambda x, P: ops.halo_exchange(x, grid(P, 2), halo=((1, 1),)),
    "broadcast": lambda x, P: ops.broadcast(x, P, P),
    "sum_reduce": lambda x, P: ops.sum_reduce(x, P, P),
    "all_sum_reduce": lambda x, P: ops.all_sum_reduce(x, grid(P, 2), [0]),
    "repartition": lambda x, P: ops.repartition(x, grid(P, 2), grid(P, 2)),
    "all_gather": lambda x, P: ops.all_gather(x, grid(P, 2), [0]),
    "sum_scatter": lambda x, P: ops.sum_scatter(x, grid(P, 2), [0]),
    "scatter": lambda x, P: ops.scatter(x, grid(P, 2)),
    "gather": lambda x, P: ops.gather(x, grid(P, 2)),
}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
@distributed(ranks=2)
def test_a_dtype_without_a_wire_is_rejected(P_world: Partition, name: str, is_first: bool) -> None:
    """Ranks of one program reject it alike, and the world goes on."""
    if not is_first:
        OPERATORS[name](torch.ones(2), P_world)
    x = torch.ones(2).to(torch.float8_e4m3fn)
    for wrong in (x, [1.0, 2.0]):
        with pytest.raises(GpudistError, match=r"dtype .*cannot be moved, only float32|list"):
            OPERATORS[name](wrong, P_world)
    OPERATORS[name](torch.ones(2), P_world)
    P_world.barrier()


@pytest.mark.parametrize("culprit", [0, 2])
@distributed(ranks=3)
def test_wrong_device_on_one_rank(P_world: Partition, culprit: int) -> None:
    device = "meta" if P_world.rank == culprit else "cpu"
    x = torch.ones(2, 2, device=device)
    with pytest.raises(ShapeError, match=rf"rank {culprit} .*cpu; move it"):
        ops.halo_exchange(x, grid(P_world, 1, 3), halo=((1, 1),))
    P_world.barrier()


@distributed(ranks=3)
def test_wrong_device_after_the_agreement(P_world: Partition) -> None:
    compare_every_call(P_world)
    layer = ops.HaloExchange(grid(P_world, 1, 3), halo=((1, 1),))
    layer(torch.ones(2, 2))
    if P_world.rank == 1:
        with pytest.raises(ShapeError, match=r"rank 1 .*meta.*cpu"):
            layer(torch.ones(2, 2, device="meta"))
    with pytest.raises(PlanMismatch):
        if P_world.rank != 1:
            layer(torch.ones(2, 2))
        P_world.barrier()
    with pytest.raises(PlanMismatch, match=r"^the world has ended, .*first error: ranks disagree"):
        layer(torch.ones(2, 2))


@distributed(ranks=3)
def test_dtypes_disagree(P_world: Partition) -> None:
    x = torch.ones(2, 2, dtype=torch.float64 if P_world.rank == 1 else torch.float32)
    with pytest.raises(PlanMismatch, match=r"rank 0: torch.float32 .*\n  rank 1: torch.float64 "):
        ops.all_gather(x, grid(P_world, 1, 3), [1])
    P_world.barrier()


@distributed(ranks=3)
def test_dtypes_disagree_after_the_agreement(P_world: Partition) -> None:
    compare_every_call(P_world)
    layer = ops.AllGather(grid(P_world, 1, 3), [1])
    layer(torch.ones(2, 2))
    with pytest.raises(PlanMismatch, match="float64"):
        layer(torch.ones(2, 2, dtype=torch.float64 if P_world.rank == 1 else torch.float32))
        P_world.barrier()


@distributed(ranks=3)
def test_numbers_of_dims_disagree(P_world: Partition) -> None:
    x = torch.ones([1] * (1 + P_world.rank))
    with pytest.raises(
        PlanMismatch, match=r"rank 0: .* 1 dims\n  rank 1: .* 2 dims\n  rank 2: .* 3 dims"
    ):
        ops.broadcast(x, P_world, P_world)
    P_world.barrier()


@distributed(ranks=2)
def test_different_operators(P_world: Partition) -> None:
    """Each rank names its own and the other's."""
    compare_every_call(P_world)
    P_x = grid(P_world, 2)
    gather, halo = ops.AllGather(P_x, [0]), ops.HaloExchange(P_x, halo=((1, 1),))
    x = torch.ones(3)
    gather(x)
    halo(x)
    with pytest.raises(
        PlanMismatch, match=r"all_gather.*\n.*halo_exchange|halo_exchange.*\n.*all_gather"
    ):
        (gather if P_world.rank == 0 else halo)(x)
        P_world.barrier()


@distributed(ranks=2)
def test_different_parameters(P_world: Partition) -> None:
    P_x = grid(P_world, 2)
    layers = [ops.HaloExchange(P_x, halo=((1, 1),), global_shape=(6,)) for _ in range(2)]
    layers[1] = ops.HaloExchange(P_x, halo=((1, 2),), global_shape=(6,))
    with pytest.raises(PlanMismatch, match="halo_exchange"):
        layers[P_world.rank](torch.ones(3))
        P_world.barrier()


@distributed(ranks=2)
def test_a_failure_is_told_to_who_waits(P_world: Partition) -> None:
    """An error that one rank alone detects ends the other's wait with the same message."""
    layer = ops.SendRecv(grid(P_world, 2), P_world.create_partition_inclusive([1, 0]))
    layer(torch.ones(3))
    with pytest.raises(PlanMismatch, match=r"rank 0 .*\[3\].*\[4\]"):
        layer(torch.ones(4 if P_world.rank == 0 else 3))


@distributed(ranks=2)
@pytest.mark.parametrize("operator", ["all_sum_reduce", "all_gather", "sum_scatter", "halo"])
def test_a_partition_without_topology_is_refused(P_world: Partition, operator: str) -> None:
    x = torch.zeros(2)
    with pytest.raises(PartitionError, match="no Cartesian topology"):
        if operator == "halo":
            ops.halo_exchange(x, P_world, halo=((1, 1),))
        else:
            getattr(ops, operator)(x, P_world, [0])
