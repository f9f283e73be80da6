"""Break down the time of one small halo exchange: ``python -m benchmarks.halo_profile``.

Two ranks exchange the halo of a float32 tensor of shape [1,8,32,16], cut in two, for a 3x3 kernel
with padding 1, without gradients. Each software layer of the call is timed alone, in turn with the
others; a line shows the time that its layer adds to the line below.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bound_plan import local_part, one_call
from gpudist import SlidingWindow
from gpudist.ops import HaloExchange
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

ROUNDS, CALLS = 30, 500


def main() -> None:
    lines = run_distributed(_lines, 2, transport="host", timeout=300.0)[0]
    table = Table("of one call", "us")
    for name, us in lines:
        table.add_row(name, f"{us:.2f}")
    Console().print(table)


def _lines(P_world: Partition) -> list[tuple[str, float]]:
    P_x = P_world.create_cartesian_topology_partition([1, 1, 2, 1])
    exchange = HaloExchange(P_x, [SlidingWindow(3, padding=(1, 1))] * 2)
    x = torch.rand(1, 8, 16, 16)
    movement, y = exchange.movement(x), exchange(x)
    layers: dict[str, Callable[[], object]] = {
        "call": lambda: exchange(x),
        "repeat": lambda: exchange._bindings.repeat(x),
        "output": lambda: torch.empty_like(y),
        "native": one_call(movement, x, y),
        "local": local_part(movement, x, y),
    }
    with torch.no_grad():
        us = _medians(P_world, layers)
    return [
        ("the operator's __call__, in Python", us["call"] - us["repeat"]),
        ("compare with the last call, record it", us["repeat"] - us["output"] - us["native"]),
        ("make the output", us["output"]),
        ("announce, pack, wait for the peer, unpack", us["native"] - us["local"]),
        ("fill the padding, copy the block", us["local"]),
        ("together", us["call"]),
    ]


def _medians(P_world: Partition, layers: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(ROUNDS):
        for name, call in layers.items():
            P_world.barrier()
            start_s = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start_s) * 1e6 / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


if __name__ == "__main__":
    main()
