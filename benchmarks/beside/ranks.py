"""A world of one library: ``python -m benchmarks.beside.ranks ADAPTER RANKS ADDRESS``.

The process imports the adapter, and forks a process per rank, which serves the controller at
ADDRESS; see :mod:`benchmarks.worlds`. All libraries start and wait alike.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping
from multiprocessing import get_context
from typing import Any, Protocol

import torch

from benchmarks.case import Case, Side
from benchmarks.correctness.ranks import About, be_rank, free_port
from benchmarks.service import serve


class Adapter(Protocol):
    """Module in ``adapters``."""

    def start(self) -> About:
        """Import the library; return what it is."""
        ...

    def sides(self, case: Case) -> Mapping[str, Side]:
        """Return this rank's sides of a case, in a world started by torchrun's variables."""
        ...


def main() -> None:
    name, number, address = sys.argv[1:]
    ranks = int(number)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    # The first step of an optimizer imports it: once here, and in the memory before every case.
    importlib.import_module("torch._dynamo")
    adapter: Any = importlib.import_module(name)
    versions = {name.rpartition(".")[2]: adapter.start().version}
    context = get_context("fork")
    arguments = (adapter, ranks, free_port(), address, versions, context.Barrier(ranks))
    processes = [
        context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _rank(
    rank: int,
    adapter: Adapter,
    ranks: int,
    port: int,
    address: str,
    versions: dict[str, str],
    barrier: Any,
) -> None:
    be_rank(rank, ranks, port)
    serve(address, rank, versions, barrier.wait, adapter.sides)


if __name__ == "__main__":
    main()
