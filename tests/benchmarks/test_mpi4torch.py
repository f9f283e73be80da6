"""The adapter of mpi4torch, over a stand-in for one rank: no current torch can build mpi4torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import worlds
from benchmarks.case import Case
from benchmarks.peers import mpi4torch
from benchmarks.worlds import RECYCLED


class World:
    rank, size = 0, 1

    def Bcast_(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        return tensor

    def Reduce_(self, tensor: torch.Tensor, op: int, root: int) -> torch.Tensor:
        return tensor

    def Allreduce(self, tensor: torch.Tensor, op: int) -> torch.Tensor:
        return tensor.clone()


def test_its_sides_are_checked() -> None:
    library = SimpleNamespace(COMM_WORLD=World(), MPI_SUM=1)
    for subject, make in mpi4torch.SUBJECTS.items():
        side = make(Case(subject, "64 B", 1, 64, {"count": 16}), library)
        result = side.call()
        assert side.is_right(result), subject
        assert not side.is_right(result + 1), subject


def test_it_is_used_where_its_venv_is(tmp_path: Path) -> None:
    assert worlds.installed(tmp_path) == []
    folder = tmp_path / "mpi4torch" / "bin"
    folder.mkdir(parents=True)
    (folder / "mpirun").touch()
    assert worlds.installed(tmp_path) == ["mpi4torch"]
    launch = worlds.mpi("mpi4torch", tmp_path, 2, RECYCLED)
    assert launch.command[-3:] == ["-m", "benchmarks.peers.mpi4torch", "mpi4torch"]
    assert launch.environment["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
