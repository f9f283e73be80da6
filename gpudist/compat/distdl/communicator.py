"""Stand-in for the part of mpi4py that DistDL programs use."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from gpudist.transport.base import ReduceOp
from gpudist.world.partition import Partition
from gpudist.world.runtime import init

# The value depends on the MPI library, which a program may have imported.
PROC_NULL: int = getattr(sys.modules.get("mpi4py.MPI"), "PROC_NULL", -1)


class Communicator:
    """Workers of a partition, under the names of mpi4py's communicators.

    Args:
        find: returns the partition; called at first use.
    """

    def __init__(self, find: Callable[[], Partition]) -> None:
        self._find = find

    @cached_property
    def partition(self) -> Partition:
        """Partition of gpudist with the same workers."""
        return self._find()

    @property
    def rank(self) -> int:
        """Position of this worker, ``MPI.PROC_NULL`` if it is not a member."""
        return self.partition.rank if self.partition.rank is not None else PROC_NULL

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.partition.size

    def Get_rank(self) -> int:
        """Return :attr:`rank`."""
        return self.rank

    def Get_size(self) -> int:
        """Return :attr:`size`."""
        return self.size

    def Barrier(self) -> None:
        """Return when every member has called it."""
        self.partition.barrier()

    def Allreduce(self, sendbuf: Any, recvbuf: NDArray[Any], op: ReduceOp = "sum") -> None:
        """Reduce the members' arrays of numbers into ``recvbuf`` of every member.

        Args:
            sendbuf: array, the same shape on all members.
            recvbuf: array for the result.
            op: ``MPI.SUM``, ``MPI.PROD``, ``MPI.MAX`` or ``MPI.MIN``.
        """
        recvbuf[...] = reduce_arrays(self.partition, sendbuf, op)

    def Reduce(
        self, sendbuf: Any, recvbuf: NDArray[Any] | None, op: ReduceOp = "sum", root: int = 0
    ) -> None:
        """Reduce the members' arrays of numbers into ``recvbuf`` of rank ``root``.

        Args:
            sendbuf, recvbuf, op: see :meth:`Allreduce`; ``recvbuf`` is ignored off the root.
            root: rank of the receiver.
        """
        result = reduce_arrays(self.partition, sendbuf, op)
        if recvbuf is not None and self.rank == root:
            recvbuf[...] = result

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        """Return a communicator of the members with this ``color``, by ``key`` and then by rank."""
        rows = self.partition.allgather_data([color, key])
        members = [rank for rank, (theirs, _) in enumerate(rows) if theirs == color]
        members.sort(key=lambda rank: (rows[rank][1], rank))
        part = self.partition.create_partition_inclusive(members)
        return Communicator(lambda: part)

    def Free(self) -> None:
        """Do nothing: communicators end with the program."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"Communicator.{name}: only Barrier, Reduce, Allreduce, Split, Get_rank and Get_size "
            "are available; for other messages start the program with mpirun and use mpi4py beside "
            "gpudist"
        )


def reduce_arrays(P: Partition, data: Any, op: ReduceOp) -> NDArray[Any]:
    """Return the members' arrays of numbers, reduced element by element, in their shape and dtype.

    Args:
        P: partition of the members.
        data: array, or numbers, of this worker.
        op: see :meth:`gpudist.Partition.allreduce_data`.

    Returns:
        Array of the shape and dtype of ``data``.
    """
    array = np.asarray(data)
    numbers = P.allreduce_data(array.reshape(-1).tolist(), op)
    return np.array(numbers, array.dtype).reshape(array.shape)


class _Mpi:
    """Names of ``mpi4py.MPI`` that DistDL programs use.

    Attributes:
        COMM_WORLD: all workers; the first use joins the world, as :func:`gpudist.init` does.
        COMM_NULL: communicator of workers outside a partition.
        PROC_NULL: rank of a worker outside a partition, and beyond the edge of a grid.
        SUM, PROD, MAX, MIN: reductions.
    """

    COMM_WORLD = Communicator(init)
    COMM_NULL = None
    PROC_NULL = PROC_NULL
    SUM: ReduceOp = "sum"
    PROD: ReduceOp = "prod"
    MAX: ReduceOp = "max"
    MIN: ReduceOp = "min"

    @staticmethod
    def Wtime() -> float:
        """Return the seconds since some fixed time."""
        return time.perf_counter()


MPI = _Mpi()


def print_sequential(comm: Communicator, val: object) -> None:
    """Print ``val`` of every member of ``comm``, in rank order. Collective."""
    comm.partition.print_sequential(val)
