"""Partitions: their members, what every rank knows about them, and the small data they share."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import gpudist
from gpudist import nn, ops, sbp
from gpudist.errors import PartitionError, PlanMismatch
from gpudist.exchange import carry_out
from gpudist.transport.loopback import LoopbackTransport
from gpudist.world import runtime
from gpudist.world.partition import CartesianPartition, Partition
from tests.pool import distributed


def operations(P: Partition) -> int:
    recorder = P.wire.recorder
    recorder.end(recorder.begin_group("counted by a test"))
    return P.wire.recorder.count


@distributed(ranks=4)
def test_creation_never_communicates_and_everyone_knows(P_world: Partition) -> None:
    before = operations(P_world)
    P = P_world.create_partition_inclusive([3, 1, 2])
    P_x = P.create_cartesian_topology_partition([3, 1])
    P_sub = P_x.create_partition_inclusive([2, 0])
    union = P_sub.create_partition_union(P_world.create_partition_inclusive([0, 3]))
    line = P_x.along([0])
    assert operations(P_world) - before == 1
    assert (P.ranks, P.shape, P.dim, P.size) == ((3, 1, 2), (3,), 1, 3)
    assert (P_x.ranks, P_x.shape, P_x.dim, P_x.size) == ((3, 1, 2), (3, 1), 2, 3)
    assert P_sub.ranks == (2, 3)
    assert union.ranks == (2, 3, 0)
    assert (line.ranks, line.shape) == ((3, 1, 2), (3, 1))
    rank = [None, 1, 2, 0][P_world.rank]
    assert P.rank == P_x.rank == rank
    assert P.active == P_x.active == (rank is not None)
    assert P.index == (None if rank is None else (rank,))
    assert P_x.index == (None if rank is None else (rank, 0))
    assert P_x.rank_of(2) == 2
    assert P_x.world == P_world
    assert P_x.device.type == "cpu"
    assert P_x.transport == P_world.wire.name
    assert ("inactive" in repr(P_x)) == (rank is None)


@distributed(ranks=4)
def test_equality_goes_by_members_and_shape(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([2, 0])
    again = P_world.create_partition_inclusive([0, 2]).create_partition_inclusive([1, 0])
    assert again == P
    assert hash(P) == hash(again)
    assert P.digest == again.digest
    assert P in {again: 0}
    others = [
        P_world.create_partition_inclusive([0, 2]),
        P.create_cartesian_topology_partition([1, 2]),
        P.create_cartesian_topology_partition([2, 1]),
        P_world,
    ]
    for other in others:
        assert other != P
        assert P.digest != other.digest
    assert len({P, *others}) == 5
    assert P != "partition"
    with_grid = P.create_cartesian_topology_partition([2])
    assert with_grid == P
    assert isinstance(with_grid, CartesianPartition)


@distributed(ranks=4)
def test_union(P_world: Partition) -> None:
    a = P_world.create_partition_inclusive([2, 1])
    b = P_world.create_partition_inclusive([3, 1, 0])
    assert a.create_partition_union(b).ranks == (2, 1, 3, 0)
    assert b.create_partition_union(a).ranks == (3, 1, 0, 2)
    grid = b.create_cartesian_topology_partition([3, 1])
    assert a.create_partition_union(grid).shape == (4,)
    assert b.create_partition_union(grid).ranks == b.ranks


@distributed(ranks=[3, 12])
def test_shared_integers(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive([2, 0, 1])
    if not P.active:
        for share in (P.allgather_data, P.allreduce_data, P.broadcast_data):
            with pytest.raises(PartitionError, match="not a member"):
                share([1])
        with pytest.raises(PartitionError, match=r"print_sequential.*not a member"):
            P.print_sequential("")
        return
    assert P.allgather_data([P.rank, -P_world.rank]) == [[0, -2], [1, 0], [2, -1]]
    assert P.allgather_data([]) == [[], [], []]
    for root in range(3):
        data = [root, 2**40, -7] if P.rank == root else None
        assert P.broadcast_data(data, root) == [root, 2**40, -7]
    assert P.broadcast_data([] if P.rank == 0 else None) == []
    mine = [P.rank + 1, -P.rank]
    assert P.allreduce_data(mine) == [6, -3]
    assert P.allreduce_data(mine, "prod") == [6, 0]
    assert P.allreduce_data(mine, "max") == [3, 0]
    assert P.allreduce_data(mine, "min") == [1, -2]
    with pytest.raises(PartitionError, match=r"'mean'.*sum, prod, max or min"):
        P.allreduce_data(mine, "mean")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PartitionError, match="root 3 is not one of 0 to 2"):
        P.broadcast_data([1], root=3)
    P.barrier()


@distributed(ranks=3)
def test_shared_floats_arrive_exactly(P_world: Partition) -> None:
    mine = [0.1 * (P_world.rank + 1), -0.0, math.inf]
    assert repr(P_world.allgather_data(mine)) == repr(
        [[0.1 * r, -0.0, math.inf] for r in (1, 2, 3)]
    )
    assert repr(P_world.broadcast_data(mine, 1)) == repr([0.2, -0.0, math.inf])
    assert P_world.broadcast_data(np.array([2.7]) if P_world.rank == 0 else None) == [2.7]
    assert P_world.allreduce_data(mine)[0] == 0.1 + 0.2 + 0.1 * 3
    assert P_world.allreduce_data([mine[0]], "max") == [0.1 * 3]
    assert P_world.allreduce_data([mine[0]], "prod") == [0.1 * 0.2 * (0.1 * 3)]
    undefined = [math.nan if P_world.rank == 1 else 1.0]
    assert all(math.isnan(P_world.allreduce_data(undefined, op)[0]) for op in ("max", "min", "sum"))


@distributed(ranks=3)
def test_ranks_that_share_integers_and_floats(P_world: Partition) -> None:
    """Each rank's numbers stay what they are, and a sum is of floats."""
    mine = [0.5, 1] if P_world.rank == 1 else [1, 2]
    rows = P_world.allgather_data(mine)
    assert repr(rows) == repr([[1, 2], [0.5, 1.0], [1, 2]])
    assert repr(P_world.allreduce_data(mine)) == repr([2.5, 5.0])
    assert P_world.allreduce_data([2**62]) == [3 * 2**62]
    with pytest.raises(PartitionError, match="9007199254740993 is mixed with floats"):
        P_world.allreduce_data([0.5 if P_world.rank == 1 else 2**53 + 1])
    P_world.barrier()


BAD = {
    "none": (None, "data is None"),
    "text": (["1"], r"data\[0\] is '1', of type str"),
    "wide": ([2**63], "data has 9223372036854775808"),
    "nested": ([[1]], r"data\[0\] is \[1\], of type list"),
    "complex": ([1j], r"data\[0\] is 1j, of type complex"),
}


@pytest.mark.parametrize("name", ["allgather_data", "allreduce_data", "broadcast_data"])
@pytest.mark.parametrize("kind", BAD)
@distributed(ranks=3)
def test_data_that_are_no_numbers_are_refused_on_all(
    P_world: Partition, name: str, kind: str
) -> None:
    data, words = BAD[kind]
    root = [1] if name == "broadcast_data" else []
    with pytest.raises(PartitionError, match=rf"{name}, rank 1 of .*: {words}"):
        getattr(P_world, name)(data if P_world.rank == 1 else [1], *root)


@pytest.mark.parametrize("name", ["allgather_data", "allreduce_data"])
@distributed(ranks=2, transports=["loopback", "host", "gloo"])
def test_lists_of_different_lengths(P_world: Partition, name: str) -> None:
    with pytest.raises(PlanMismatch):
        getattr(P_world, name)([1] * (1 + P_world.rank))


@distributed(ranks=3)
def test_print_sequential(P_world: Partition) -> None:
    """One line a rank, in rank order; ranks may share a stream, as threads do, or not."""
    P = P_world.create_partition_inclusive([2, 0, 1])
    stream = io.StringIO()
    shared = isinstance(P_world.wire, LoopbackTransport)
    if shared and P_world.rank == 0:
        with contextlib.redirect_stdout(stream):
            P.print_sequential("from 0")
        assert stream.getvalue().splitlines() == [
            "rank 0: from 2",
            "rank 1: from 0",
            "rank 2: from 1",
        ]
    elif shared:
        P.print_sequential(f"from {P_world.rank}")
    else:
        with contextlib.redirect_stdout(stream):
            P.print_sequential(f"from {P_world.rank}")
        assert stream.getvalue() == f"rank {P.rank}: from {P_world.rank}\n"
    assert sys.stdout is not stream


@distributed(ranks=12)
def test_grid(P_world: Partition) -> None:
    P = P_world.create_partition_inclusive(range(11, -1, -1))
    P_x = P.create_cartesian_topology_partition([2, 3, 2])
    assert [P_x.cartesian_index(rank) for rank in (0, 1, 2, 7, 11)] == [
        (0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1), (1, 2, 1),
    ]  # fmt: skip
    assert P_x.index == P_x.cartesian_index(11 - P_world.rank)
    assert P_x.neighbor_ranks(0) == [(None, 6), (None, 2), (None, 1)]
    assert P_x.neighbor_ranks(8) == [(2, None), (6, 10), (None, 9)]
    assert P_x.neighbor_ranks(11) == [(5, None), (9, None), (10, None)]
    with pytest.raises(PartitionError, match="rank 12 is not one of 0 to 11"):
        P_x.neighbor_ranks(12)
    i, j, k = P_x.index
    line = P_x.create_cartesian_subtopology_partition([False, True, False])
    assert line.shape == (3,)
    assert line.index == (j,)
    assert line.ranks == tuple(11 - (6 * i + 2 * m + k) for m in range(3))
    plane = P_x.along([0, -1])
    assert plane.shape == (2, 1, 2)
    assert plane.index == (i, 0, k)
    assert plane.ranks == tuple(11 - (6 * a + 2 * j + b) for a in range(2) for b in range(2))
    assert P_x.create_allreduction_partition([0, 2]) == plane
    assert P_x.along([]).ranks == (P_world.rank,)
    assert plane.allreduce_data([1]) == [4]
    with pytest.raises(PartitionError, match=r"2 entries .* 3 axes"):
        P_x.create_cartesian_subtopology_partition([True, False])


@distributed(ranks=3)
def test_grid_off_its_workers(P_world: Partition) -> None:
    """An inactive worker answers the same questions, and gets the line through rank 0."""
    P_x = P_world.create_partition_inclusive([2, 1]).create_cartesian_topology_partition([1, 2])
    assert P_x.neighbor_ranks(0) == [(None, None), (None, 1)]
    assert P_x.cartesian_index(1) == (0, 1)
    line = P_x.along([1])
    assert line.ranks == (2, 1)
    assert line.active == P_x.active
    inner = P_x.create_partition_inclusive([1])
    assert inner.ranks == (1,)
    assert inner.active == (P_world.rank == 1)


def test_worlds_do_not_mix() -> None:
    one, other = (runtime.world_of(LoopbackTransport.single()) for _ in range(2))
    assert one != other
    with pytest.raises(PartitionError, match=r"create_partition_union: .* belong to two worlds"):
        one.create_partition_union(other)
    grids = [P.create_cartesian_topology_partition([1, 1]) for P in (one, other)]
    with pytest.raises(PartitionError, match=r"DistributedMSELoss: .* belong to two worlds"):
        nn.DistributedMSELoss(grids[0], P_loss=other)
    with pytest.raises(PartitionError, match=r"DistributedLinear: .* belong to two worlds|union: "):
        nn.DistributedLinear(grids[0], grids[0], grids[1], 2, 2)
    x = torch.ones(2, 2)
    copies = [sbp.broadcast, sbp.broadcast]
    whole = sbp.to_global(x, sbp.Placement.of(grids[0]), copies)
    with pytest.raises(PartitionError, match=r"to_global: .* belong to two worlds"):
        whole.to_global(sbp.Placement.of(grids[1]), copies)
    movements = [ops.Repartition(P, P).movement(x) for P in grids]
    with pytest.raises(PartitionError, match=r"repartition .* belong to two worlds"):
        carry_out(movements, (x, x))


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.mark.parametrize("mixes", [[0, 1], [1]])
@distributed(ranks=2, transports=["host", "gloo"])
def test_worlds_of_the_same_ranks_do_not_mix(
    P_world: Partition, mixes: list[int], store_path: str
) -> None:
    """Worlds raise also if only one rank mixes them, and the other one waits for it."""
    store = dist.FileStore(store_path, P_world.size)
    wire = runtime.connect(P_world.transport, store, P_world.rank, P_world.size, 20.0, "other")
    P_other = runtime.world_of(wire)
    assert P_other.ranks == P_world.ranks and P_other != P_world
    with (
        contextlib.closing(wire),
        pytest.raises(PartitionError, match=r"Broadcast: .* belong to two worlds"),
    ):
        gpudist.broadcast(torch.ones(2), P_world, P_other if P_world.rank in mixes else P_world)


def network(P: Partition) -> tuple[torch.nn.Module, torch.Tensor]:
    P_x = P.create_cartesian_topology_partition([1, 1, 1])
    layers = nn.DistributedConv1d(P_x, 1, 2, 3), torch.nn.ReLU(), nn.DistributedDropout(P_x)
    return torch.nn.Sequential(*layers), torch.ones(1, 1, 8)


def test_partitions_are_not_pickled(tmp_path: Path) -> None:
    P = runtime.world_of(LoopbackTransport.single())
    model, x = network(P)
    for used in (False, True):
        if used:
            model(x).sum().backward()
        for thing in (P, model):
            words = r"cannot be pickled.*state_dict\(\).*checkpoint\.save.*gpudist\.sequential"
            with pytest.raises(PartitionError, match=words):
                pickle.dumps(thing)
            with pytest.raises(PartitionError, match=words):
                torch.save(thing, tmp_path / "model")
        assert copy.copy(P) is copy.deepcopy(P) is P
        twin = copy.deepcopy(model)
        assert twin(x).shape == model(x).shape
        assert next(copy.copy(model).children()) is next(model.children())


class WithPartition(torch.utils.data.Dataset[int]):
    def __init__(self, P: Partition) -> None:
        self.P = P

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


def test_workers_that_are_spawned_get_no_partitions() -> None:
    dataset = WithPartition(runtime.world_of(LoopbackTransport.single()))
    loader: Any = torch.utils.data.DataLoader(
        dataset, num_workers=1, multiprocessing_context="spawn"
    )
    with pytest.raises(PartitionError, match="cannot be pickled"):
        next(iter(loader))


@distributed(ranks=4, transports=["loopback"])
def test_grids_that_do_not_fit_say_what_does(P_world: Partition) -> None:
    half = P_world.create_partition_inclusive([0, 1])
    for P, shape, remedy in (
        (
            P_world,
            [2, 3],
            "start 6 processes, as by torchrun --nproc-per-node 6, or use a grid of 4",
        ),
        (
            half,
            [1, 3],
            "select 3 of the 4 workers of the world with create_partition_inclusive, or",
        ),
        (P_world, [1, 3], "first select as many with create_partition_inclusive"),
        (P_world, [0, 4], "every axis has at least one"),
    ):
        with pytest.raises(PartitionError, match=remedy):
            P.create_cartesian_topology_partition(shape)


@distributed(ranks=4, transports=["loopback"])
def test_grid_of_the_first_workers(P_world: Partition) -> None:
    first = P_world.create_partition_inclusive([0, 1])
    assert P_world.grid(2, 2) == P_world.create_cartesian_topology_partition([2, 2])
    assert P_world.grid(1, 2) == first.create_cartesian_topology_partition([1, 2])
    for shape in ([2, 2], (2, 2), torch.Size([2, 2]), np.array([2, 2])):
        assert P_world.grid(shape) == P_world.grid(2, 2)
    assert P_world.grid(np.int64(1), 2).active == (P_world.rank < 2)
    assert P_world.create_partition_inclusive([3, 1]).grid(2).ranks == (3, 1)
    for P, shape, remedy in (
        (P_world, (2, 3), "start 6 processes"),
        (first, (3,), "select 3 of the 4 workers"),
        (P_world, (-2, -2), "every axis has at least one"),
        (P_world, ("22",), "the shape of a process grid must be a list of integers, not '22'"),
    ):
        with pytest.raises(PartitionError, match=remedy):
            P.grid(*shape)


def test_long_lists_are_shortened() -> None:
    P = Partition(LoopbackTransport.single(), range(5, 105))
    assert repr(P) == "Partition(shape=[100], world ranks [5, ..., 104], inactive)"
    with pytest.raises(PartitionError, match="communicator"):
        _ = P.communicator
