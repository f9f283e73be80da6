"""Our world: ``python -m benchmarks.ranks RANKS ADDRESS``, started by :mod:`benchmarks.worlds`."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping

import torch

import gpudist
from benchmarks.case import Case, Side
from benchmarks.service import serve
from gpudist.partition import Partition
from gpudist.testing import run_distributed

RUN_S = 3600.0


@torch.no_grad()
def serve_rank(P_world: Partition, address: str, new_pages: bool) -> None:
    _bind_to_a_core(P_world)
    if new_pages:
        gpudist.recycling.set_limit(0)

    def prepare(case: Case) -> Mapping[str, Side]:
        return importlib.import_module(f"benchmarks.{case.subject}").sides(case, P_world)

    assert P_world.rank is not None
    versions = {"gpudist": gpudist.__version__, "torch": torch.__version__}
    serve(address, P_world.rank, versions, P_world.barrier, prepare)


def _bind_to_a_core(P_world: Partition) -> None:
    """As mpirun does where there are enough: a rank that moves to another's core holds it up."""
    cores = sorted(os.sched_getaffinity(0))
    if P_world.size <= len(cores):
        os.sched_setaffinity(0, {cores[P_world.rank or 0]})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--new-pages", action="store_true", help="keep no freed memory")
    parser.add_argument("address")
    options = parser.parse_args()
    run_distributed(
        serve_rank, options.ranks, options.address, options.new_pages,
        transport="host", timeout=RUN_S,
    )  # fmt: skip


if __name__ == "__main__":
    main()
