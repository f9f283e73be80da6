"""Check whether the partition that the planner ranks first is the fastest one measured.

    python -m benchmarks.plan --ranks 4 --size 64 --json benchmarks/results/plan/unet-4.json

Measures a profile of this machine and a training step of the U-Net example on every partition of
its volume over local processes. The program prints both, and the regret: by how much the partition
predicted to be the best is slower than the fastest one. It also measures the time to plan for 4096
ranks. The exit status is 1 if either exceeds its limit. Results of a machine with other load are
meaningless.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gpudist
from benchmarks.environment import environment
from examples.networks import UNet3d
from gpudist.geometry import Decomposition
from gpudist.planning import Profile, measured_profile, plan
from gpudist.planning.table import text
from gpudist.testing import run_distributed
from gpudist.world.partition import Partition

LIMIT_S = 500.0
LARGEST_REGRET, LONGEST_PLANNING_S = 0.10, 10.0
MANY_RANKS, MANY_CELLS = 4096, (1, 1, 512, 512, 512)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return UNet3d(1, 3, 8)


def measure(
    P_world: Partition, shape: tuple[int, ...], grids: list[tuple[int, ...]], rounds: int
) -> list[float]:
    """Return the median seconds of a step on each grid, of the slowest rank; grids take turns."""
    torch.set_num_threads(1)
    steps: list[tuple[torch.nn.Module, torch.Tensor]] = []
    for grid in grids:
        P_x = P_world.create_cartesian_topology_partition(grid)
        assert P_x.index is not None
        block = Decomposition.balanced(shape, grid).block(P_x.index)
        converted = gpudist.distribute(network(), P_x)
        # Equal blocks would be refused: they may be one tensor that every rank has.
        torch.manual_seed(P_world.rank or 0)
        steps.append((converted, torch.randn(block.shape)))
    seconds: list[list[int]] = [[] for _ in grids]
    for turn in range(rounds + 1):
        for (converted, x), found in zip(steps, seconds, strict=True):
            P_world.barrier()
            start_s = time.perf_counter()
            y = converted(x).to_local()
            y.backward(torch.ones_like(y))
            mine = int(1e9 * (time.perf_counter() - start_s))
            slowest = P_world.allreduce_data([mine], "max")[0]
            if turn:
                found.append(slowest)
    return [median(found) * 1e-9 for found in seconds]


def profile_here(P_world: Partition) -> Profile:
    torch.set_num_threads(1)
    return measured_profile(P_world)


def planning_s() -> float:
    """Return the seconds to plan the network for 4096 ranks."""
    start_s = time.perf_counter()
    plan(network(), MANY_CELLS, MANY_RANKS, "h100")
    return time.perf_counter() - start_s


def missed(facts: dict[str, Any]) -> list[str]:
    """Describe the limits that a run exceeds."""
    found: list[str] = []
    measured = facts["measured_seconds"]
    if measured[0] > (1 + LARGEST_REGRET) * min(measured):
        best = facts["grids"][measured.index(min(measured))]
        found.append(f"{facts['grids'][0]} was predicted to be best, and {best} is")
    if facts["planning_4096_seconds"] > LONGEST_PLANNING_S:
        found.append(f"{MANY_RANKS} ranks took {facts['planning_4096_seconds']:.1f} s to plan")
    return found


def run(ranks: int, size: int, rounds: int) -> dict[str, Any]:
    """Predict, measure and print; return the facts, in seconds and bytes."""
    shape = (1, 1, *(size,) * 3)
    options = {"transport": "host", "timeout": LIMIT_S}
    profile = run_distributed(profile_here, ranks, **options)[0]
    advice = plan(network(), shape, ranks, profile)
    grids = [one.grid for one in advice]
    measured = run_distributed(measure, ranks, shape, grids, rounds, **options)[0]
    print(text(advice))
    for one, seconds in zip(advice, measured, strict=True):
        ratio = seconds / one.seconds
        print(f"{list(one.grid)}: {1e3 * seconds:.1f} ms measured, {ratio:.2f} of the prediction")
    regret = measured[0] / min(measured) - 1
    print(f"regret of the partition predicted to be best: {100 * regret:.1f} %")
    return {
        "torch": torch.__version__,
        "ranks": ranks, "shape": list(shape), "rounds": rounds, "profile": asdict(profile),
        "grids": [list(grid) for grid in grids],
        "predicted_seconds": [one.seconds for one in advice],
        "measured_seconds": measured, "regret": regret,
        "ratios": [s / one.seconds for s, one in zip(measured, advice, strict=True)],
        "all_messages": [one.all_messages for one in advice],
        "all_message_bytes": [one.all_message_bytes for one in advice],
    }  # fmt: skip


def main() -> int:
    options = _options()
    command = " ".join(["python -m benchmarks.plan", *sys.argv[1:]])
    here = environment(command, options.rounds)
    # Measure this first, before this run starts other processes.
    many_s = planning_s()
    print(f"{MANY_RANKS} ranks: planned in {many_s:.1f} s")
    facts = {"environment": here, **run(options.ranks, options.size, options.rounds)}
    facts["planning_4096_seconds"] = many_s
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    for words in missed(facts):
        print(f"missed: {words}")
    return 1 if missed(facts) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--size", type=int, default=32, help="cells per side, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps on each partition")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
