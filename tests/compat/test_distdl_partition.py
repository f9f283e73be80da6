"""Partitions and communicators with DistDL's attributes."""

# pyright: reportMissingImports=false
from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpudist.compat import distdl
from gpudist.compat.distdl import MPI
from gpudist.compat.distdl.backends.mpi.partition import MPICartesianPartition, MPIPartition
from gpudist.errors import PartitionError, ShapeError
from gpudist.world.partition import Partition
from tests import warm
from tests.pool import distributed

LOCAL = ("loopback", "host")


@distributed(ranks=4)
def test_attributes_are_arrays(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    assert (P.active, P.rank, P.size, P.dim, P.index) == (True, P_world.rank, 4, 1, P_world.rank)
    P_x = P.create_partition_inclusive(np.arange(3)).create_cartesian_topology_partition([3, 1])
    assert isinstance(P_x, MPICartesianPartition)
    shape = P_x.shape.copy()
    shape[1] *= P_x.shape[0]
    assert P_x.shape.tolist() == [3, 1] and shape.tolist() == [3, 3] and P_x.shape.prod() == 3
    if P_x.active:
        # Elementwise, unlike that of a tuple.
        assert (P_x.index == 0).tolist() == [P_world.rank == 0, True]
        assert P_x.size == 3 and P_x.rank == P_world.rank


@distributed(ranks=3, transports=LOCAL)
def test_inactive_partitions(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    base = P.create_partition_inclusive([1])
    P_x = base.create_cartesian_topology_partition([1, 1])
    assert base.active == P_x.active == (P_world.rank == 1)
    if not base.active:
        assert base.rank == P_x.rank == MPI.PROC_NULL < 0
        assert base.size == P_x.size == -1 and base.index is None and P_x.index is None
        assert base.shape.tolist() == [-1] and P_x.shape.tolist() == [1, 1] and P_x.dim == 2
        assert base._comm is MPI.COMM_NULL and base != base


@distributed(ranks=4)
def test_barrier_and_deactivate(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    assert P._comm is not None and P.comm is P._comm
    P._comm.Barrier()
    assert (P._comm.Get_rank(), P._comm.Get_size()) == (P_world.rank, 4)
    P.deactivate()
    # Layers and partitions made before and after it work.
    assert P.active
    P._comm.Barrier()
    assert P.create_partition_inclusive([3, 0]).size == (2 if P_world.rank in (0, 3) else -1)


@distributed(ranks=4, transports=LOCAL)
def test_partition_of_a_communicator(P_world: Partition) -> None:
    communicator, rank = MPIPartition(P_world)._comm, int(P_world.rank or 0)
    assert communicator is not None
    part = communicator.Split(color=rank % 2, key=-rank)
    P = MPIPartition(part)
    assert P.size == 2 and P.partition.ranks == ((2, 0), (3, 1))[rank % 2]
    total = np.zeros(2)
    communicator.Reduce(np.array([1.5, P_world.rank]), total, op=MPI.SUM, root=2)
    assert total.tolist() == ([6.0, 6.0] if P_world.rank == 2 else [0.0, 0.0])
    communicator.Allreduce(np.array([1.5, P_world.rank]), total, op=MPI.MAX)
    assert total.tolist() == [1.5, 3.0]
    with pytest.raises(AttributeError, match=r"Communicator\.Scatterv: only Barrier, Reduce"):
        _ = communicator.Scatterv
    part.Free()


def rank_in(P_from: MPIPartition, P: MPIPartition) -> list[int]:
    return [P_from.partition.rank_of(rank) for rank in P.partition.ranks]


@distributed(ranks=6, transports=LOCAL)
def test_broadcast_and_reduction_groups(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_few = P.create_partition_inclusive([5, 2]).create_cartesian_topology_partition([2, 1])
    P_many = P.create_partition_inclusive([0, 1, 2, 3]).create_cartesian_topology_partition([2, 2])
    # Ranks of the world: 5 sends to 0 and 1, and 2 sends to 2 and 3.
    groups = {5: [5, 0, 1], 2: [2, 3]}
    source = {0: 5, 1: 5, 2: 2, 3: 2}
    sends, receives = P_few.create_broadcast_partition_to(P_many)
    for group, root in (
        (sends, P_world.rank if P_world.rank in groups else None),
        (receives, source.get(int(P_world.rank or 0))),
    ):
        assert group.active == (root is not None)
        assert rank_in(P, group) == (groups[root] if root is not None else [])
    # The adjoint reduces in the same groups.
    to_root, of_root = P_many.create_reduction_partition_to(P_few)
    assert (set(rank_in(P, to_root)), set(rank_in(P, of_root))) == (
        set(rank_in(P, receives)), set(rank_in(P, sends)),
    )  # fmt: skip
    assert not to_root.active or rank_in(P, to_root)[0] == source[int(P_world.rank or 0)]
    with pytest.raises(PartitionError, match="does not broadcast"):
        P_many.create_broadcast_partition_to(P_few)


@distributed(ranks=6, transports=LOCAL)
def test_transposed_groups(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_src = P.create_cartesian_topology_partition([2, 3])
    P_dest = P.create_cartesian_topology_partition([3, 2])
    sends, receives = P_src.create_broadcast_partition_to(P_dest, transpose_src=True)
    # Each block goes to the worker of equal rank.
    assert sends == receives and sends.size == 1 and sends.rank == 0


@distributed(ranks=4)
def test_broadcast_data(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    P_data = P.create_partition_inclusive([2, 1])
    for data in (
        np.array([[1, 2], [3, 4]]), np.array(2.5, np.float32), np.array([True, False]),
        np.zeros((0, 3)), np.array([2**62 + 1]),
    ):  # fmt: skip
        given = data if P_world.rank == 2 else None
        result = P.broadcast_data(given, P_data=P_data)
        assert result is not None and np.array_equal(result, data)
        assert result.shape == data.shape and result.dtype == data.dtype
    sent = P.broadcast_data(np.array([P.rank]), root=3)
    assert sent is not None and sent.tolist() == [3]
    if not P_data.active:
        assert P_data.broadcast_data(np.zeros(1)) is None


@distributed(ranks=2, transports=("loopback",))
def test_broadcast_data_refuses_text(P_world: Partition) -> None:
    P = MPIPartition(P_world).create_partition_inclusive([0])
    if P.active:
        with pytest.raises(ShapeError, match="integers, bools or floats"):
            P.broadcast_data(np.array(["text"]))


@distributed(ranks=4)
def test_gathered_and_reduced_data(P_world: Partition) -> None:
    P = MPIPartition(P_world)
    assert P.allgather_data(np.array([P.rank, 7])).tolist() == [[r, 7] for r in range(4)]
    total = P.allreduce_data(np.full((2, 1), P.rank, np.int32))
    assert total.tolist() == [[6], [6]] and total.dtype == np.int32
    assert int(P.allreduce_data(np.asarray(3), op="prod")) == 81
    with pytest.raises(ValueError, match="op is 'mean'"):
        op: Any = "mean"
        P.allreduce_data(np.zeros(1), op=op)


@distributed(ranks=6, transports=LOCAL)
def test_cartesian_methods(P_world: Partition) -> None:
    P = MPIPartition(P_world).create_cartesian_topology_partition(
        np.array([2, 3]), reorder=False, periods=[False, False]
    )
    assert P.cartesian_index(4).tolist() == [1, 1]
    null = MPI.PROC_NULL
    assert P.neighbor_ranks(4) == [(1, null), (3, 5)]
    assert P.neighbor_ranks(0) == [(null, 3), (null, 1)]
    row = P.create_cartesian_subtopology_partition([False, True])
    assert row.shape.tolist() == [3] and row.rank == P.index[1]
    column = P.create_allreduction_partition((0,))
    assert column.shape.tolist() == [2, 1] and column.rank == P.index[0]
    union = P.create_partition_inclusive([1]).create_partition_union(P)
    assert union.partition.ranks == (1, 0, 2, 3, 4, 5)
    with pytest.raises(PartitionError, match=r"\{'periods': True\} is not supported"):
        P.create_cartesian_topology_partition([6], periods=True)


@distributed(ranks=2, transports=("loopback",))
def test_gpudist_takes_the_wrapped_partition(P_world: Partition) -> None:
    from gpudist import nn

    P_x = MPIPartition(P_world).create_cartesian_topology_partition([1, 1, 2])
    y = nn.DistributedConv1d(P_x.partition, 1, 1, 3, padding=1)(torch.ones(1, 1, 2))
    assert y.shape == (1, 1, 2)
    with pytest.raises(PartitionError, match=r"P_x is .*; it takes a CartesianPartition"):
        nn.DistributedConv1d(P_x, 1, 1, 3)  # type: ignore[arg-type]
    with pytest.raises(PartitionError, match="has no Cartesian topology"):
        distdl.nn.DistributedFeatureConv1d(MPIPartition(P_world), 1, 1, 3)  # type: ignore[arg-type]


class OfMpi4py:
    """Communicator of mpi4py, with what ``MPIPartition`` reads of it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import gpudist.compat.distdl as distdl
from gpudist.compat.distdl import MPI
from gpudist.compat.distdl.backends.mpi.partition import MPIPartition
from gpudist.errors import PartitionError
from tests.compat.test_distdl_partition import OfMpi4py
MPI.COMM_WORLD.Barrier()
P_world = distdl.backend.backend.Partition(MPI.COMM_WORLD)
assert (P_world.rank, P_world.size) == (MPI.COMM_WORLD.rank, 2) and MPI.COMM_WORLD.size == 2
assert MPIPartition(OfMpi4py(P_world.rank, 2)) == P_world
try:
    MPIPartition(OfMpi4py(0, 1))
except PartitionError as error:
    assert "rank 0 of 1" in str(error)
else:
    raise AssertionError("a part of the world was taken for the world")
assert not MPIPartition().active and MPIPartition(MPI.COMM_NULL).rank == MPI.PROC_NULL
started = MPI.Wtime()
assert MPI.Wtime() >= started
open(f"{folder}/done {{P_world.rank}}", "w").close()
"""


def test_world_under_torchrun_without_mpi4py(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM.format(root=str(Path(__file__).resolve().parents[2]), folder=tmp_path)
    )
    command = [warm.python(), "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*command, "--nproc-per-node", "2", str(program)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in tmp_path.glob("done *")) == ["done 0", "done 1"]


def test_what_is_not_a_communicator() -> None:
    with pytest.raises(PartitionError, match=r"comm is 3; it takes MPI\.COMM_WORLD"):
        MPIPartition(3)
