"""Partitions: who is in them, what everyone knows of them, and the small data they share."""

# In a test body every rank is a member, so that ranks and indices are not None.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from gpudist import runtime
from gpudist.errors import PartitionError
from gpudist.partition import CartesianPartition, Partition
from gpudist.transport.loopback import LoopbackTransport
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
    with pytest.raises(PartitionError, match="rank 3 is not one of 0 to 2"):
        P.broadcast_data([1], root=3)
    P.barrier()


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
    with pytest.raises(PartitionError, match="different worlds"):
        one.create_partition_union(other)


def test_long_lists_are_shortened() -> None:
    P = Partition(LoopbackTransport.single(), range(5, 105))
    assert repr(P) == "Partition(shape=[100], world ranks [5, ..., 104], inactive)"
    with pytest.raises(PartitionError, match="communicator"):
        _ = P.communicator
