"""Is the partition that the planner finds best the one that is measured to be?

    python -m benchmarks.plan --ranks 4

Measures a profile of this machine, a training step of the U-Net example on every partition of its
volume over local processes, and prints both, with the regret: by how much the partition predicted
to be best is slower than the one measured to be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

import gpudist
from examples.networks import UNet3d
from gpudist.geometry import Decomposition
from gpudist.partition import Partition
from gpudist.planning import Profile, measured_profile, plan
from gpudist.planning.table import text
from gpudist.testing import run_distributed

LIMIT_S = 500.0


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return UNet3d(1, 3, 8)


def measure(
    P_world: Partition, shape: tuple[int, ...], grids: list[tuple[int, ...]], rounds: int
) -> list[float]:
    """Seconds of a step on each grid: medians of the slowest rank's, the grids taking turns."""
    torch.set_num_threads(1)
    steps: list[tuple[torch.nn.Module, torch.Tensor]] = []
    for grid in grids:
        P_x = P_world.create_cartesian_topology_partition(grid)
        assert P_x.index is not None
        block = Decomposition.balanced(shape, grid).block(P_x.index)
        steps.append((gpudist.distribute(network(), P_x), torch.randn(block.shape)))
    seconds: list[list[int]] = [[] for _ in grids]
    for turn in range(rounds + 1):
        for (converted, x), found in zip(steps, seconds, strict=True):
            P_world.barrier()
            start_s = time.perf_counter()
            y = converted(x)
            y.backward(torch.ones_like(y))
            mine = int(1e9 * (time.perf_counter() - start_s))
            slowest = P_world.allreduce_data([mine], "max")[0]
            if turn:
                found.append(slowest)
    return [median(found) * 1e-9 for found in seconds]


def profile_here(P_world: Partition) -> Profile:
    torch.set_num_threads(1)
    return measured_profile(P_world)


def main() -> int:
    options = _options()
    shape = (1, 1, *(options.size,) * 3)
    run = {"transport": "host", "timeout": LIMIT_S}
    profile = run_distributed(profile_here, options.ranks, **run)[0]
    advice = plan(network(), shape, options.ranks, profile)
    grids = [one.grid for one in advice]
    measured = run_distributed(measure, options.ranks, shape, grids, options.rounds, **run)[0]
    regret = measured[0] / min(measured) - 1
    print(text(advice))
    for one, seconds in zip(advice, measured, strict=True):
        ratio = seconds / one.seconds
        print(f"{list(one.grid)}: {1e3 * seconds:.1f} ms measured, {ratio:.2f} of the prediction")
    print(f"regret of the partition predicted to be best: {100 * regret:.1f} %")
    if options.json:
        facts = {
            "ranks": options.ranks, "shape": list(shape), "profile": asdict(profile),
            "grids": [list(grid) for grid in grids],
            "predicted_seconds": [one.seconds for one in advice],
            "measured_seconds": measured, "regret": regret,
        }  # fmt: skip
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--size", type=int, default=32, help="cells per side, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps on each partition")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
