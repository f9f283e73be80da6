"""A world of gpudist, started by :mod:`benchmarks.worlds`.

``python -m benchmarks.ranks RANKS ADDRESS``.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping

import torch

import gpudist
from benchmarks.case import Case, Side
from benchmarks.service import serve
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

RUN_S = 3600.0


@torch.no_grad()
def serve_rank(P_world: Partition, address: str, new_pages: bool) -> None:
    if new_pages:
        gpudist.recycling.set_limit(0)

    def prepare(case: Case) -> Mapping[str, Side]:
        return importlib.import_module(f"benchmarks.{case.subject}").sides(case, P_world)

    assert P_world.rank is not None
    versions = {"gpudist": gpudist.__version__, "torch": torch.__version__}
    binding = _Binding(P_world)
    serve(address, P_world.rank, versions, P_world.barrier, prepare, binding)


class _Binding:
    """Binds each rank to a core if there are enough, as mpirun does; gloo's threads stay free."""

    def __init__(self, P_world: Partition) -> None:
        self._all = os.sched_getaffinity(0)
        self._mine = self._all
        if P_world.size <= len(self._all):
            self._mine = {sorted(self._all)[P_world.rank or 0]}

    def __call__(self, side: str) -> None:
        is_free = side.startswith(("gloo", "dtensor"))
        os.sched_setaffinity(0, self._all if is_free else self._mine)


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
