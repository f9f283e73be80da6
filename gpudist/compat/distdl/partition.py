"""Partitions with DistDL's attributes: arrays for shape and index, ``PROC_NULL`` for no rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpudist.compat.distdl.communicator import PROC_NULL, Communicator, reduce_arrays
from gpudist.errors import PartitionError, ShapeError
from gpudist.geometry.broadcasting import Pairing
from gpudist.transport.base import ReduceOp
from gpudist.world.partition import CartesianPartition, Partition
from gpudist.world.runtime import init

Integers = NDArray[np.int64]
Numbers = Sequence[int] | NDArray[Any]
# Members of a partition without a topology and without this worker know only that.
_NO_SHAPE = (-1,)


class MPIPartition:
    """Workers, as DistDL shows them; wraps a partition of gpudist.

    Partitions hold no resources until they are used, and creating one never communicates. Two
    partitions are equal if this worker is in both and they have the same members and shape.

    Args:
        comm: ``MPI.COMM_WORLD``, of mpi4py or of ``gpudist.compat.distdl``; or a partition of
            gpudist. Without it the partition is inactive.

    Attributes:
        partition: partition of gpudist, for use with gpudist's own layers.
        active: whether this worker is a member.
        rank: position of this worker, ``MPI.PROC_NULL`` if it is not a member.
        size: number of members, -1 if this worker is not a member.
        shape: array ``[size]``, or the shape of the process grid on every worker.
        index: rank, or array of this worker's index on the grid; ``None`` if it is not a member.
        dim: number of axes.

    Raises:
        PartitionError: ``comm`` is a communicator of a part of the world.
    """

    def __init__(self, comm: Any = None) -> None:
        self.partition = _partition_of(comm)
        P = self.partition
        self.active = P.active
        self.rank: int = P.rank if P.rank is not None else PROC_NULL
        self.size = P.size if P.active else -1
        self.shape: Integers = np.array(self._shape(), np.int64)
        self.dim = len(self.shape)
        self.index: Any = self._index()

    def _shape(self) -> tuple[int, ...]:
        return self.partition.shape if self.active else _NO_SHAPE

    def _index(self) -> Any:
        return self.partition.rank

    @cached_property
    def _comm(self) -> Communicator | None:
        return Communicator(lambda: self.partition) if self.active else None

    @property
    def comm(self) -> Communicator | None:
        """Communicator of the members, ``None`` on other workers."""
        return self._comm

    @property
    def device(self) -> torch.device:
        """Device of the tensors that this partition moves."""
        return self.partition.device

    def deactivate(self) -> None:
        """Do nothing: there is nothing to free."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MPIPartition) or not self.active:
            return False
        return self.partition == other.partition

    def __hash__(self) -> int:
        return hash(self.partition)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.partition!r})"

    def create_partition_inclusive(self, ranks: Numbers) -> MPIPartition:
        """Return a partition of the members at positions ``ranks``, in this order."""
        return MPIPartition(self.partition.create_partition_inclusive(list(ranks)))

    def create_partition_union(self, other: MPIPartition) -> MPIPartition:
        """Return a partition of these members, followed by those of ``other`` not among them."""
        return MPIPartition(self.partition.create_partition_union(other.partition))

    def create_cartesian_topology_partition(
        self, shape: Numbers, **options: Any
    ) -> MPICartesianPartition:
        """Return the first ``prod(shape)`` members on a process grid, in row-major order.

        As in MPI, the other members are not in the partition that is returned.

        Args:
            shape: number of workers along each axis.
            options: options of ``MPI_Cart_create``; only false ones are accepted.

        Raises:
            PartitionError: ``prod(shape)`` exceeds the number of members, or an option is true.
        """
        asked = {name: value for name, value in options.items() if np.any(value)}
        if asked:
            raise PartitionError(
                f"create_cartesian_topology_partition: {asked} is not supported; ranks keep their "
                "order, and periodic axes are an argument of gpudist.halo_exchange"
            )
        return MPICartesianPartition(self.partition.grid(*shape))

    def create_broadcast_partition_to(
        self, P_dest: MPIPartition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[MPIPartition, MPIPartition]:
        """Return the groups in which this worker's blocks are broadcast to ``P_dest``.

        Args:
            P_dest: partition of the copies.
            transpose_src, transpose_dest: see :func:`gpudist.broadcast`.

        Returns:
            Group to which this worker sends, and group in which it receives; rank 0 is the source.
            A worker that does not send, or does not receive, gets an inactive partition.

        Raises:
            PartitionError: the shapes do not broadcast.
        """
        P_src, P_dst = self.partition, P_dest.partition
        pairing = Pairing(P_src.shape, P_dst.shape, transpose_src, transpose_dest)
        return _groups(P_src, P_dst, pairing, P_src.create_partition_union(P_dst))

    def create_reduction_partition_to(
        self, P_dest: MPIPartition, transpose_src: bool = False, transpose_dest: bool = False
    ) -> tuple[MPIPartition, MPIPartition]:
        """Return the groups in which this worker's blocks are summed into those of ``P_dest``.

        Args:
            P_dest: partition of the sums.
            transpose_src, transpose_dest: see :func:`gpudist.sum_reduce`.

        Returns:
            Group in which this worker sends, and group from which it receives; rank 0 has the sum.
            A worker that does not send, or does not receive, gets an inactive partition.

        Raises:
            PartitionError: the shapes do not broadcast in the opposite direction.
        """
        P_src, P_dst = self.partition, P_dest.partition
        pairing = Pairing(P_dst.shape, P_src.shape, transpose_dest, transpose_src)
        receives, sends = _groups(P_dst, P_src, pairing, P_src.create_partition_union(P_dst))
        return sends, receives

    def broadcast_data(
        self, data: Any, root: int = 0, P_data: MPIPartition | None = None
    ) -> NDArray[Any] | None:
        """Broadcast an array of numbers. Collective over the members.

        Args:
            data: array of integers, bools or floats; ignored off the root.
            root: rank in ``P_data`` of the worker that has ``data``.
            P_data: partition whose workers are among these members, by default this one.

        Returns:
            Array of the root; ``None`` on workers outside this partition.
        """
        if not self.active:
            return None
        P = self.partition
        source = P.rank_of((P_data.partition if P_data is not None else P).ranks[root])
        array = np.asarray(data) if P.rank == source else np.zeros(0)
        if array.dtype.kind not in "biuf":
            raise ShapeError(
                f"broadcast_data: the data has dtype {array.dtype}; it must be integers, bools or "
                "floats"
            )
        header = [array.dtype.itemsize, ord(array.dtype.kind), *array.shape]
        size, kind, *shape = P.broadcast_data(header, source)
        values = P.broadcast_data(array.reshape(-1).tolist(), source)
        return np.array(values, f"{chr(kind)}{size}").reshape(shape)

    def allgather_data(self, data: Numbers) -> NDArray[Any]:
        """Return the numbers of every member, one row per rank. Collective over the members."""
        return np.array(self.partition.allgather_data(np.asarray(data).reshape(-1).tolist()))

    def allreduce_data(self, data: Any, op: ReduceOp = "sum") -> NDArray[Any]:
        """Reduce the members' arrays element by element. Collective over the members.

        Args:
            data: array of this worker, the same shape on all members.
            op: ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``.

        Returns:
            Array of the shape and dtype of ``data``, the same on all members.
        """
        return reduce_arrays(self.partition, data, op)

    def print_sequential(self, val: object) -> None:
        """Print ``val`` of every member, in rank order; do nothing on other workers."""
        if self.active:
            self.partition.print_sequential(val)


class MPICartesianPartition(MPIPartition):
    """Workers on a process grid, as DistDL shows them; see :class:`MPIPartition`.

    Args:
        partition: Cartesian partition of gpudist.
    """

    partition: CartesianPartition

    def __init__(self, partition: CartesianPartition) -> None:
        if not isinstance(partition, CartesianPartition):
            raise PartitionError(
                f"MPICartesianPartition: {partition!r:.80} has no Cartesian topology; give it one "
                "with create_cartesian_topology_partition"
            )
        super().__init__(partition)

    def _shape(self) -> tuple[int, ...]:
        return self.partition.shape

    def _index(self) -> Integers | None:
        return np.array(self.partition.index, np.int64) if self.active else None

    def cartesian_index(self, rank: int) -> Integers:
        """Return the index of member ``rank`` on the process grid."""
        return np.array(self.partition.cartesian_index(rank), np.int64)

    def neighbor_ranks(self, rank: int) -> list[tuple[int, int]]:
        """Return the left and right neighbor of ``rank`` per axis, ``PROC_NULL`` at an edge."""
        left_and_right = self.partition.neighbor_ranks(rank)
        return [
            (PROC_NULL if left is None else left, PROC_NULL if right is None else right)
            for left, right in left_and_right
        ]

    def create_cartesian_subtopology_partition(
        self, remain: Sequence[bool]
    ) -> MPICartesianPartition:
        """Return the workers whose index differs from this one's only along the kept axes."""
        kept = [bool(keep) for keep in remain]
        return MPICartesianPartition(self.partition.create_cartesian_subtopology_partition(kept))

    def create_allreduction_partition(self, axes_reduce: Sequence[int]) -> MPICartesianPartition:
        """Return the workers whose index differs from this one's only along ``axes_reduce``."""
        return MPICartesianPartition(self.partition.along(axes_reduce))


def _partition_of(comm: Any) -> Partition:
    if isinstance(comm, Partition):
        return comm
    if isinstance(comm, Communicator):
        return comm.partition
    if comm is None:
        return Partition(init().wire, ())
    if not hasattr(comm, "Get_size"):
        raise PartitionError(f"MPIPartition: comm is {comm!r:.80}; it takes MPI.COMM_WORLD")
    P_world = init()
    if (comm.Get_rank(), comm.Get_size()) != (P_world.rank, P_world.size):
        raise PartitionError(
            f"MPIPartition: the communicator has rank {comm.Get_rank()} of {comm.Get_size()}, the "
            f"world of gpudist rank {P_world.rank} of {P_world.size}; pass MPI.COMM_WORLD, and "
            "make parts of it with create_partition_inclusive"
        )
    return P_world


def _groups(
    P_root: Partition, P_member: Partition, pairing: Pairing, P_all: Partition
) -> tuple[MPIPartition, MPIPartition]:
    """Return the group of which this worker is the root, and the group of which it is a member."""

    def group(root: int) -> MPIPartition:
        first = P_root.ranks[root]
        others = {P_member.ranks[rank] for rank in pairing.targets_of(root)} - {first}
        return MPIPartition(Partition(P_all.wire, [first, *sorted(others, key=P_all.rank_of)]))

    nobody = MPIPartition(Partition(P_all.wire, ()))
    as_root = group(P_root.rank) if P_root.rank is not None else nobody
    if P_member.rank is None:
        return as_root, nobody
    return as_root, group(pairing.source_of(P_member.rank))
