"""Printing in rank order."""

from __future__ import annotations

from gpudist.compat.distdl.backends.mpi.communicator import Communicator


def print_sequential(comm: Communicator, val: object) -> None:
    """Print ``val`` of every member of ``comm``, in rank order. Collective."""
    comm.partition.print_sequential(val)
