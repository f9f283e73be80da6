"""Mpi4torch in an MPI world: ``mpirun python -m benchmarks.peers.mpi4torch NAME ADDRESS``.

Its venv has torch and mpi4torch, but not gpudist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.case import Case, Side, equals, is_empty, pattern, pattern_sum
from benchmarks.service import serve


def broadcast(case: Case, library: Any) -> Side:
    import torch

    world, count = library.COMM_WORLD, case.parameters["count"]
    block = torch.from_numpy(pattern(count, 0))
    is_root = world.rank == 0
    return Side(
        lambda: world.Bcast_(block.clone() if is_root else torch.empty(count), 0),
        equals(block.numpy()),
    )


def sum_reduce(case: Case, library: Any) -> Side:
    import torch

    world, count = library.COMM_WORLD, case.parameters["count"]
    x = torch.from_numpy(pattern(count, world.rank))
    if world.rank == 0:
        is_right = equals(pattern_sum(count, world.size))
        return Side(lambda: world.Reduce_(x.clone(), library.MPI_SUM, 0), is_right)
    return Side(lambda: world.Reduce_(x.clone(), library.MPI_SUM, 0)[:0], is_empty)


def all_sum_reduce(case: Case, library: Any) -> Side:
    import torch

    world, count = library.COMM_WORLD, case.parameters["count"]
    x = torch.from_numpy(pattern(count, world.rank))
    is_right = equals(pattern_sum(count, world.size))
    return Side(lambda: world.Allreduce(x, library.MPI_SUM), is_right)


SUBJECTS: dict[str, Callable[[Case, Any], Side]] = {
    f.__name__: f for f in (broadcast, sum_reduce, all_sum_reduce)
}


def main() -> None:
    # Imported here, since the controller reads SUBJECTS without it.
    import torch

    mpi4torch = import_module("mpi4torch")

    name, address = sys.argv[1:]
    world = mpi4torch.COMM_WORLD

    def prepare(case: Case) -> dict[str, Side]:
        make = SUBJECTS.get(case.subject)
        return {} if make is None else {name: make(case, mpi4torch)}

    def barrier() -> None:
        world.Allreduce(torch.zeros(1), mpi4torch.MPI_SUM)

    serve(address, world.rank, {name: torch.__version__}, barrier, prepare)


if __name__ == "__main__":
    main()
