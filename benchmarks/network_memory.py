"""Peak memory of one training step of a U-Net: the sequential network and every rank's part.

``python -m benchmarks.network_memory --size 128 --ranks 4 --json FILE``. Each side runs in new
processes. Freed blocks of 64 KiB and more are returned to the system, so that the peak shows the
memory of tensors; ``--system-malloc`` keeps glibc's own settings. The memory resident after the
imports is subtracted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gpudist
from benchmarks.halo import grid_of
from benchmarks.resident import forget_peak, status_mib
from benchmarks.worlds import NEW, ROOT
from examples.networks import UNet3d
from gpudist.nn import DistributedCrossEntropyLoss
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

CLASSES = 3
RUN_S = 500.0


@dataclass(frozen=True)
class Peak:
    """Peak memory of one rank, in MiB.

    Attributes:
        before_mib: resident memory after the imports.
        peak_mib: largest increase over ``before_mib`` during one step, the network included.
    """

    before_mib: float
    peak_mib: float


def step(P_world: Partition, size: int, width: int) -> Peak:
    """Run forward, backward and an update; the network is sequential if the world has one rank."""
    torch.set_num_threads(1)
    before_mib = status_mib("VmRSS")
    grid = grid_of(P_world.size, 5) if P_world.size > 1 else (1,) * 5
    P_x = P_world.create_cartesian_topology_partition(grid)
    torch.manual_seed(0)
    network: nn.Module = UNet3d(1, CLASSES, width)
    criterion: nn.Module = nn.CrossEntropyLoss()
    if P_world.size > 1:
        network = gpudist.distribute(network, P_x)
        criterion = DistributedCrossEntropyLoss(P_x)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    cells = [size // n for n in P_x.shape[2:]]
    forget_peak()
    # Equal blocks would be refused: they may be one tensor that every rank has.
    torch.manual_seed(P_world.rank or 0)
    x, target = torch.randn(1, 1, *cells), torch.randint(CLASSES, (1, *cells))
    y: Any = network(x)
    y = y.to_local() if isinstance(y, gpudist.GlobalTensor) else y
    criterion(y, target).backward()
    optimizer.step()
    return Peak(before_mib, status_mib("VmHWM") - before_mib)


def measured(ranks: int, size: int, width: int, system_malloc: bool) -> list[Peak]:
    """Measure every rank of a new world, in new processes."""
    command = [sys.executable, "-m", "benchmarks.network_memory"]
    command += ["--size", str(size), "--width", str(width), "--world", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not system_malloc:
        environment |= NEW.environment
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return [Peak(**peak) for peak in json.loads(done.stdout.splitlines()[-1])]


def main() -> int:
    options = _options()
    if options.world is not None:
        arguments = (options.world, options.size, options.width)
        peaks = run_distributed(step, *arguments, transport="host", timeout=RUN_S)
        print(json.dumps([asdict(peak) for peak in peaks]))
        return 0
    (alone,), ours = (
        measured(n, options.size, options.width, options.system_malloc) for n in (1, options.ranks)
    )
    highest = max(ours, key=lambda peak: peak.peak_mib)
    ratio = highest.peak_mib / alone.peak_mib
    print(
        f"U-Net of width {options.width} on {options.size}^3 cells, one training step: "
        f"{alone.peak_mib:.0f} MiB sequential, at most {highest.peak_mib:.0f} MiB on each of "
        f"{options.ranks} ranks, ratio {ratio:.3f}"
    )
    if options.json:
        record = {
            "size": options.size, "width": options.width, "ranks": options.ranks, "ratio": ratio,
            "malloc": "system" if options.system_malloc else "returning",
            "sequential": asdict(alone), "distributed": [asdict(peak) for peak in ours],
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", type=int, default=128, help="cells a side")
    parser.add_argument("--width", type=int, default=8, help="channels of the first level")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--system-malloc", action="store_true", help="glibc's own settings")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
