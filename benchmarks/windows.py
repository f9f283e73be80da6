"""Attention in windows of a split volume: a training step of SwinUNETR beside the naive way.

``python -m benchmarks.windows --ranks 4 --json FILE``. The network is MONAI's, unmodified and of
small width. The naive way gathers the volume on every rank, which computes the whole step. Each
side runs in new processes, as in :mod:`benchmarks.network_memory`. The memory resident after a
first step is subtracted and reported as well: the network, and what libraries keep.
"""

# The package may be missing, and what its annotations allow is its own.
# pyright: reportMissingImports=false, reportPrivateImportUsage=false

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import gpudist
from benchmarks.layers import block_of
from benchmarks.resident import forget_peak, status_mib
from benchmarks.worlds import NEW, ROOT
from gpudist.ops import AllGather
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

SIDES = ("sequential", "gpudist", "gathered")
RUN_S = 900.0


@dataclass(frozen=True)
class Measured:
    """One rank's training step.

    Attributes:
        before_mib: resident memory before the step.
        peak_mib: largest increase in the step.
        sent_bytes: bytes sent in the step.
        seconds: time of the step.
        loss: loss, which all sides share up to rounding.
    """

    before_mib: float
    peak_mib: float
    sent_bytes: int
    seconds: float
    loss: float


def swin_unetr(window: int) -> Any:
    """Return the network, equal on all ranks."""
    from monai.networks import nets

    torch.manual_seed(0)
    return nets.SwinUNETR(
        1, 2, feature_size=12, depths=(2, 2, 1, 1), num_heads=(1, 2, 4, 8), window_size=window
    )


def step(P_world: Partition, side: str, size: tuple[int, ...], window: int) -> Measured:
    """Measure the second training step of a side."""
    torch.set_num_threads(1)
    shape = (1, 1, *size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1, 1))
    block = block_of(x, P_x)
    network = swin_unetr(window)
    network = gpudist.distribute(network, P_x) if side == "gpudist" else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    gather = AllGather(P_x, (2,))

    def run() -> float:
        y = network(gather(block) if side == "gathered" else block)
        loss = y.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        return float(loss.full_tensor() if side == "gpudist" else loss)

    run()
    gc.collect()
    P_world.barrier()
    before_mib, sent = status_mib("VmRSS"), _sent_bytes(P_world)
    forget_peak()
    start_s = time.perf_counter()
    loss = run()
    seconds = time.perf_counter() - start_s
    peak_mib = status_mib("VmHWM") - before_mib
    return Measured(before_mib, peak_mib, _sent_bytes(P_world) - sent, seconds, loss)


def _sent_bytes(P_world: Partition) -> int:
    return sum(row.sent_bytes for row in gpudist.stats(P_world=P_world))


def measured(side: str, ranks: int, size: tuple[int, ...], window: int) -> list[Measured]:
    """Measure every rank of a new world, in new processes."""
    command = [sys.executable, "-m", "benchmarks.windows", "--side", side]
    command += ["--ranks", str(ranks), "--window", str(window), "--size", *map(str, size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **NEW.environment}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [Measured(**one) for one in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    options = _options()
    size = tuple(options.size)
    if options.side is not None:
        arguments = (options.ranks, options.side, size, options.window)
        found = run_distributed(step, *arguments, transport="host", timeout=RUN_S)
        print(json.dumps([asdict(one) for one in found]))
        return 0
    window = options.window
    line: dict[str, Any] = {"size": size, "window": window, "ranks": options.ranks}
    for side in SIDES:
        of_ranks = measured(side, 1 if side == "sequential" else options.ranks, size, window)
        line[side] = {
            "peak_mib": max(one.peak_mib for one in of_ranks),
            "before_mib": max(one.before_mib for one in of_ranks),
            "sent_bytes": sum(one.sent_bytes for one in of_ranks),
            "seconds": max(one.seconds for one in of_ranks),
            "loss": of_ranks[0].loss,
        }
        line[side]["ratio"] = line[side]["peak_mib"] / line["sequential"]["peak_mib"]
        values = ", ".join(f"{key} {value:.6g}" for key, value in line[side].items())
        print(
            f"SwinUNETR, windows of {window}, {list(size)} cells, {len(of_ranks)} ranks, "
            f"{side}: {values}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.windows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--size", type=int, nargs=3, default=[128, 64, 32], help="cells a side")
    parser.add_argument("--window", type=int, default=7, help="tokens a side of a window")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
